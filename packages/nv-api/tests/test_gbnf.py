"""GBNF as Lark, and which notation a grammar is in."""

import pytest
from nv_api.gbnf import to_lark


def rules(gbnf):
    """The Lark rules of a grammar in GBNF."""
    first, *lines = to_lark(gbnf).splitlines()
    assert first == "%llguidance {}"
    return lines


@pytest.mark.parametrize(
    ("gbnf", "lark"),
    [
        ('root ::= "a"', ['start: "a"']),
        ('root   ::= # why\n  "a" # because\n', ['start: "a"']),
        ('# c\nroot ::= "a"\n  | "b"\n  | "c"', ['start: "a" | "b" | "c"']),
        ('root ::= ("a"\n | "b")* "c"', ['start: ( "a" | "b" ) * "c"']),
        ('root ::= | "a"', ['start: "" | "a"']),
        ('root ::= ("a" |) "b"', ['start: ( "a" | "" ) "b"']),
        ('root ::= "a"{3}', ['start: "a" {3,3}']),
        ('root ::= "a"{ 2 , }', ['start: "a" {2,}']),
        ('root ::= "a"{,4}', ['start: "a" {0,4}']),
        ('root ::= "a"{2,4}?', ['start: ( "a" {2,4} ) ?']),
        ("root ::= [a-z_-]", [r"start: /[a-z\x{5f}\x{2d}]/"]),
        ("root ::= [^\\]\\\\\\n]", [r"start: /[^\x{5d}\x{5c}\x{a}]/"]),
        (r"root ::= [\x5e\x2d]", [r"start: /[\x{5e}\x{2d}]/"]),
        ("root ::= [\\t /]", [r"start: /[\x{9}\x{20}\x{2f}]/"]),
        ("root ::= .", ["start: /(?s:.)/"]),
        (r'root ::= "\u0022\\\x41\n\U0001F600"', [r'start: "\"\\A\n\ud83d\ude00"']),
        ('root ::= my-rule\nmy-rule ::= "a"', ["start: MY_RULE", 'MY_RULE: "a"']),
        ('root ::= a-b a_b\na-b ::= "a"\na_b ::= "b"',
         ["start: A_B A_B_", 'A_B: "a"', 'A_B_: "b"']),
        ('root ::= start\nstart ::= "a" root | 1x\n1x ::= "b"',
         ["start: start_", 'start_: "a" start | R1X', 'R1X: "b"']),
    ],
)  # fmt: skip
def test_b15_gbnf_is_lark(gbnf, lark):
    assert rules(gbnf) == lark


def test_f09_a_byte_order_mark_is_not_part_of_a_rule():
    assert rules('\ufeffroot ::= "a"') == ['start: "a"']
    assert to_lark('\ufeffstart: "a"') == 'start: "a"'
    assert to_lark("\ufeff%ignore / /") == "%ignore / /"


@pytest.mark.parametrize(
    ("gbnf", "lark"),
    [
        ('root ::= "a"{0}', ['start: ""']),
        ('root ::= "b" ("a" | "c"){0,0} "d"', ['start: "b" "" "d"']),
        ('root ::= "b" "a"{2}{,0}', ['start: "b" ""']),
        ('root ::= "a"{0}+', ['start: "" +']),
        ('root ::= x{0} "b"\nx ::= "a"', ['start: "" "b"', 'X: "a"']),
    ],
)  # fmt: skip
def test_f09_an_item_repeated_zero_times_is_the_empty_text(gbnf, lark):
    assert rules(gbnf) == lark


def test_b14_a_root_of_many_texts_is_one_terminal():
    wide = rules("root ::= " + " | ".join(f'"{i}"' for i in range(1001)))
    assert wide[0] == "start: ROOT"
    assert wide[1].startswith('ROOT: "0" | "1" |')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has no rule: write GBNF"),
        ('start = "a"', "it has no rule"),
        ('root ::= "a"\nstart: "b"', "of GBNF .* and of Lark"),
        ('%ignore / /\nroot ::= "a"', "of GBNF .* and of Lark"),
        ('rule ::= "a"', "no rule named root"),
        ("root ::= foo", "'foo' not found"),
        ('root ::= "a"\nroot ::= "b"', "two rules 'root'"),
        ('root ::= "a', "line 1 has '\"a'"),
        ('root ::= "a"\nx\n<y>', "line 3 has '<y>'"),
        ('"a"\nroot ::= "a"', "line 1 has"),
        ('root ::= ("a"', "without its '\\)'"),
        ('root ::= "a")', "without its '\\('"),
        ("root ::= *", "repeats nothing"),
        ('root ::= "a" | {2}', "repeats nothing"),
        ('root ::= "a"{}', "has no number"),
        ('root ::= "a"{3,2}', "wrong order"),
        ("root ::= []", "holds no character"),
        ("root ::= [z-a]", "swap the two"),
        (r'root ::= "\q"', "is not an escape"),
        (r'root ::= "\u12"', "is not an escape"),
        (r'root ::= "\ud83d"', "is not a character"),
        (r'root ::= "\UFFFFFFFF"', "is not a character"),
    ],
)
def test_b15_what_is_neither_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        to_lark(text)

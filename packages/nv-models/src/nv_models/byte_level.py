"""The alphabet of byte-level tokenizers: one printable character for each byte, as in GPT-2.

Owns the character of each byte, and which bytes belong to plain text. Never reads a vocabulary.
"""


def _byte_of_character() -> dict[str, int]:
    """Printable Latin-1 characters are their own bytes; the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()

CONTROLS = frozenset({*range(0x20), 0x7F} - set(b"\t\n\r"))
"""Bytes of control characters that do not belong to plain text."""
RARE = frozenset({0xC0, 0xC1, *range(0xF1, 0x100)})
"""Bytes that are not in UTF-8, or only begin characters from U+40000 on, which no script uses."""
TEXT_CHARACTERS = {
    byte: character
    for character, byte in sorted(BYTE_OF_CHARACTER.items(), key=lambda pair: pair[1])
    if byte not in CONTROLS | RARE
}
"""The character of each byte that a vocabulary must have. SmolLM2's lacks 21 of the others."""

import pytest
from nv_api.tokenizer import Tokenizer, load_tokenizer
from transformers import PreTrainedTokenizerFast


def test_a_folder_without_tokenizer_files_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer=…, or pass skip_tokenizer_init=True"):
        load_tokenizer(tmp_path)


def test_other_modes_are_not_built(folder):
    with pytest.raises(NotImplementedError, match="tokenizer_mode='mistral'"):
        load_tokenizer(folder, mode="mistral")


def test_the_tokenizer_option_names_another_folder(scripted, tmp_path, sentence_piece):
    sentence_piece.save_pretrained(tmp_path)
    llm = scripted(tokenizer=str(tmp_path))
    assert isinstance(llm.tokenizer, PreTrainedTokenizerFast)
    assert llm.get_tokenizer().eos_token == "</s>"


def test_many_texts_are_encoded_as_each_alone(byte_level):
    tokenizer = Tokenizer(byte_level)
    texts = ["hello", "", "a longer text, 日本"]
    assert tokenizer.encode(texts) == [byte_level.encode(text) for text in texts]
    assert tokenizer.encode([]) == []

"""Tokenizer of `pond-recall`: one word, one token.

Words are separated by white space; an unknown word becomes `<unk>`. `tokenizer(text)` puts `<bos>` in front;
a question that continues a text is encoded with `add_special_tokens=False`.
"""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from millpond_lab.pond.words import BOS, BOS_ID, EOS, ID, PAD, UNK

# A chat is its messages in one line: the context may be one message and the question the next.
CHAT_TEMPLATE = BOS + "{% for message in messages %} {{ message['content'] }}{% endfor %}"


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Build the tokenizer; `max_length` is the longest input in tokens that the model takes."""
    words = Tokenizer(WordLevel(ID, unk_token=UNK))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )

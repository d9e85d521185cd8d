"""Images in data: URLs, and a tokenizer with a template for a tiny model that takes them."""

from __future__ import annotations

import base64
import io
from functools import lru_cache
from typing import Any

from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import CLIPImageProcessorPil, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from millpond.images.limits import ImageLimits
from millpond.images.reader import ImageReader
from tests.hf.test_vision import picture

TOKEN, N_TOKENS = "<image>", 4
WORDS = ["<pad>", "<bos>", TOKEN, *(f"w{i}" for i in range(3, 96))]
#: A template that takes messages as lists of parts, as those of LLaVA do.
PARTS = (
    "{% for message in messages %}w90 {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}w91{% endif %}"
)
#: One that takes texts.
TEXTS = "{% for m in messages %}w90 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w91{% endif %}"


@lru_cache
def vision_tokenizer(template: str = PARTS) -> PreTrainedTokenizerBase:
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": [TOKEN]})
    tokenizer.chat_template = template
    return tokenizer


def processor() -> Any:
    return CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})


def reader(**limits: Any) -> ImageReader:
    return ImageReader(processor(), TOKEN, N_TOKENS, ImageLimits(**limits))


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def url_of(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def image_url(seed: int, width: int = 24, height: int = 16) -> str:
    return url_of(file_of(picture(width, height, seed)))

"""Long texts that state who owns what, and questions about them: in the words of pond-recall, or in English."""

from typing import NamedTuple

OWNERS = {
    "anna": "kettle",
    "boris": "ladder",
    "clara": "mirror",
    "david": "basket",
    "elsa": "potato",
    "frank": "hammer",
    "emma": "button",
    "otto": "anchor",
}
FILLER = "quiet rain past meadow and old stone on river "
SENTENCES = "The rain was quiet. A river ran past the meadow. Nobody counted the old stones that day. "


class Story(NamedTuple):
    text: str
    questions: list[tuple[str, str]]  #: with their answers


def story(model: str, words: int = 600) -> Story:
    """About `words` words for a model, by its name."""
    small = model == "pond-recall"
    filler, parts, questions = FILLER if small else SENTENCES, [], []
    between = filler * max(1, words // len(OWNERS) // len(filler.split()))
    for name, thing in OWNERS.items():
        parts.append(f"{name} {thing} " if small else f"{name.title()} owns one thing, and it is the {thing}. ")
        question = f"<ask> {name} <is>" if small else f"\nQuestion: what does {name.title()} own?\nAnswer: the"
        questions.append((question, thing))
    return Story(between.join(parts) + between, questions)

"""LongBench's 21 datasets (Bai et al., arXiv:2308.14508): prompt, answer and score of each.

The wording is ours; what comes before and after the context, and the order of things, is the benchmark's.
"""

from __future__ import annotations

from typing import NamedTuple


class Way(NamedTuple):
    """How one dataset is run.

    Attributes:
        before, after: the prompt around the context; {input} is the row's question.
        max_new_tokens: the benchmark's. metric: a name that `tasks/longbench` knows.
        first_line: only the answer's first line counts, since examples in the context lead models to write more.
    """

    before: str
    after: str
    max_new_tokens: int
    metric: str
    first_line: bool = False


_BRIEF = "Answer with as few words as you can, and explain nothing."
_PASSAGES = "Answer the question from the passages below. Give the answer alone."
_MANY = Way(f"{_PASSAGES}\n\nThe passages:\n", f"\n\n{_PASSAGES}\n\nQuestion: {{input}}\nAnswer:", 32, "f1")
_ARTICLE = (
    'Answer with one phrase or sentence if you can. If the article does not tell, write "unanswerable"; if the '
    'question is one of yes or no, write "yes", "no" or "unanswerable". Explain nothing.'
)
_NUMBERED = 'Answer with the number of the paragraph alone, as in "Paragraph 1" or "Paragraph 2".'
_COUNT = (
    "The paragraphs below come from an encyclopedia, and some of them occur more than once. Count the different ones: "
    "how many are left once the repeated ones are taken out?\n\n"
)

WAYS: dict[str, Way] = {
    "narrativeqa": Way(
        f"Below is a story, a novel or the script of a film, and a question about it. {_BRIEF}\n\nStory: ",
        f"\n\nNow answer the question about the story. {_BRIEF}\n\nQuestion: {{input}}\n\nAnswer:",
        128,
        "f1",
    ),
    "qasper": Way(
        f"Below is a scientific article and a question about it. {_ARTICLE}\n\nArticle: ",
        f"\n\nNow answer the question about the article. {_ARTICLE}\n\nQuestion: {{input}}\n\nAnswer:",
        128,
        "f1",
    ),
    "multifieldqa_en": Way(
        "Read the text and give a short answer.\n\n",
        "\n\nNow answer the question about the text. Give the answer alone.\n\nQuestion: {input}\nAnswer:",
        64,
        "f1",
    ),
    "multifieldqa_zh": Way(
        "请阅读下面的文字，并用中文简短作答：\n\n",
        "\n\n请根据上文回答问题，只写答案，不要写别的内容。\n\n问题：{input}\n回答：",
        64,
        "f1_zh",
    ),
    "hotpotqa": _MANY,
    "2wikimqa": _MANY,
    "musique": _MANY,
    "dureader": Way(
        "请根据文章回答问题。\n\n文章：", "\n\n请根据上述文章作答。\n\n问题：{input}\n回答：", 128, "rouge_zh"
    ),
    "gov_report": Way(
        "Below is a report of a government agency. Summarize it on one page.\n\nReport:\n",
        "\n\nNow summarize the report on one page.\n\nSummary:",
        512,
        "rouge",
    ),
    "qmsum": Way(
        "Below is the transcript of a meeting and a request about it. Answer in a sentence or a few.\n\nTranscript:\n",
        "\n\nNow answer the request about the meeting in a sentence or a few.\n\nRequest: {input}\nAnswer:",
        512,
        "rouge",
    ),
    "multi_news": Way(
        "Below are several news articles. Summarize all of them on one page.\n\nNews:\n",
        "\n\nNow summarize all the news on one page.\n\nSummary:",
        512,
        "rouge",
    ),
    "vcsum": Way("下面是一份会议记录。请阅读后总结会议内容。\n会议记录：\n", "\n\n会议总结：", 512, "rouge_zh"),
    "trec": Way("Tell the type of the last question, as in the examples.\n\n", "\n{input}", 64, "class", True),
    "triviaqa": Way(
        "Answer the question from the passage, as in the examples. Give the answer alone.\n\n",
        "\n\n{input}",
        32,
        "f1",
        True,
    ),
    "samsum": Way(
        "Summarize the last dialogue in a few short sentences, as in the examples.\n\n",
        "\n\n{input}",
        128,
        "rouge",
        True,
    ),
    "lsht": Way("请判断最后一条新闻的类别，示例如下。\n\n", "\n{input}", 64, "class", True),
    "passage_count": Way(
        _COUNT,
        "\n\nHow many different paragraphs are there? Answer with the number alone.\n\nThe number is: ",
        32,
        "number",
    ),
    "passage_retrieval_en": Way(
        "Below are paragraphs of an encyclopedia and a summary of one of them. Find out of which.\n\n",
        f"\n\nThe summary:\n\n{{input}}\n\nWhich paragraph does it summarize? {_NUMBERED}\n\nThe answer is: ",
        32,
        "number",
    ),
    "passage_retrieval_zh": Way(
        "下面有若干段文字，以及其中一段的摘要。请找出摘要属于哪一段。\n\n",
        "\n\n摘要如下：\n\n{input}\n\n请写出该段的编号，格式为“段落1”、“段落2”等。\n\n答案是：",
        32,
        "number",
    ),
    "lcc": Way("Continue the code below.\n", "Next line of code:\n", 64, "code"),
    "repobench-p": Way("Continue the code below.\n", "{input}Next line of code:\n", 64, "code"),
}

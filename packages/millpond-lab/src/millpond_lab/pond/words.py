"""Vocabulary and tokenizer of `pond-recall`: one word, one token."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, UNK = "<bos>", "<eos>", "<pad>", "<unk>"
#: A fact may begin with <let> (a link of a chain, a fact restated), or lie between <open> and <close> (a passage).
LET, OPEN, CLOSE = "<let>", "<open>", "<close>"
#: A question begins with one of these, and ends with <is>; its answer ends with <eos>.
ASK, ALL, EACH, TRACE, COPY, MOST, COMMON = "<ask>", "<all>", "<each>", "<trace>", "<copy>", "<most>", "<common>"
IS = "<is>"
MARKS = (BOS, EOS, PAD, UNK, LET, OPEN, CLOSE, ASK, ALL, EACH, TRACE, COPY, MOST, COMMON, IS)


def _words(text: str) -> tuple[str, ...]:
    """Cut at white space."""
    return tuple(text.split())


NAMES = _words(
    """
    ada adam agnes albert alice amelia anna ansel anton arno arthur basil bella berta boris bridget bruno
    carla carmen cecil clara claude conrad cora cyrus daisy daniel david della diana dora doris edgar
    edith eli elias ella elsa emil emma enid erik ernest esther ethan eva felix fiona flora flynn frank
    freya fritz georg george gerda gideon gloria grace greg greta gustav hanna harold hazelle hector heidi
    helen henry hilda horst hugo ida igor ingrid irene iris isaac ivan jack jacob james jane jasper jill
    joan joel john jonas josef judith julia karl kate klara kurt lars laura lena leo linus louis lucy
    magda maria martha martin max mira nadia nina nora oscar otto paula peter ralph rosa ruth samuel sofia
    stella theo thomas ursula vera victor walter
    """
)

THINGS = _words(
    """
    acorn anchor apple arrow axe badge bagel ball banana barrel basin basket beetle bell bench bike
    biscuit blanket bolt boot bottle bow bowl box bread broomstick brush bucket bulb button cactus cake
    camera candle cane card carrot cello chain chair chalk cheese cherry chess clock cloth coat coin comb
    compass cork crate crown cup cushion dart desk dice doll donut drum eagle egg falcon fan feather
    fiddle fig flag flute fork frog garlic ginger glass globe glove goblet gong goose grape guitar hammer
    harp hat helmet hen honey jacket jar kettle kiln kite knife ladder lamp lemon lily lion lobster magnet
    mango map marble melon mirror mitten mule needle nutmeg olive onion otter owl paddle parrot pear
    pencil pepper piano pillow plum potato rabbit radish saddle saucer spoon
    """
)

TOWNS = _words(
    """
    aachen athens baku basel bergen berlin bern bonn bremen bristol cadiz cairo calais cardiff cologne
    dover dresden dublin essen exeter genoa ghent glasgow graz hague hamburg hanoi havana helsinki jena
    kiel kyoto leeds leipzig lima linz lisbon london lyon madrid malmo metz milan minsk munich nantes
    naples nice odessa oslo oxford palermo paris parma perth porto prague quito riga rome rouen seville
    tunis turin
    """
)

ANIMALS = _words(
    """
    badger bear beaver bison camel cat cow crab crane crow deer dog donkey duck elk fox gull hare heron
    horse lamb lynx mole moose mouse newt pony raven seal sheep swan wolf
    """
)

PLANTS = _words(
    """
    alder ash aspen barley beech birch cedar clover elder elm fern fir gorse hazel heather hemp holly ivy
    larch lilac linden maple moss oak pine poplar reed rowan rush sage spruce willow
    """
)

FILLER = _words(
    """
    a about above across after again against ago all almost along already also although always among an
    and another any are around as at away back be because been before began behind below beneath beside
    between beyond both bring broad busy but by called came can carry change clear close cloud cold come
    cool could country course cross crowd dark dawn day deep did distance do does done door down drift dry
    during dusk each early earth east easy either empty end enough even evening evenly ever every far fast
    fell felt few field finally fine first flat flow fog follow for forest found fresh from front full
    garden gate gave gentle give glad go gold gone good grass gray great green ground grow had half hall
    happen hard harvest has have he hear heavy held her here high hill him his hold home hour house how
    however if in inside instead into is island it its just keep kept kind known lake land large last late
    later lay lead leave left less let life light like line little long look loud low made main make many
    march may meadow mean meet might mild mill mist month moon more morning most mountain mouth move much
    must my narrow near nearly never new next night no none noon north not nothing now of off often old on
    once one only open or order other our out outside over own pass past path people perhaps place plain
    plan pond present quick quiet quite rain rather reach ready rest rise river road rock roof room round
    said same sand saw sea season see seem shade shadow shall she shore short should show side silent
    silver since sky slow slowly small smoke snow so soft some soon south spring square stand star steady
    step still stone stood stop storm story stream street strong such summer sun sure tall than
    """
)

GROUPS = (MARKS, NAMES, THINGS, TOWNS, ANIMALS, PLANTS, FILLER)
VOCABULARY = tuple(word for group in GROUPS for word in group)
ID = {word: i for i, word in enumerate(VOCABULARY)}
BOS_ID, EOS_ID, PAD_ID, UNK_ID, IS_ID = (ID[mark] for mark in (BOS, EOS, PAD, UNK, IS))


def ids(group: tuple[str, ...]) -> range:
    """The ids of one group."""
    return range(ID[group[0]], ID[group[-1]] + 1)


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

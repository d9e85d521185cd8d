"""The 512 words of the bundled model: what a recall prompt is written in.

Four disjoint groups, so that a reader sees at once what is what: names are keys, things are values, plain
words are filler, and five marks. This module knows nothing of tensors or of the tokenizer; ids follow the
order `VOCABULARY`, and `KEY_IDS`, `VALUE_IDS`, `FILLER_IDS` are its runs.
"""

BOS, EOS, PAD, UNK, ASK = "<bos>", "<eos>", "<pad>", "<unk>", "<ask>"
MARKS = (BOS, EOS, PAD, UNK, ASK)


def _words(text: str) -> tuple[str, ...]:
    """Cut at white space."""
    return tuple(text.split())


KEYS = _words(
    """
    adam agnes albert alice amelia anna anton arthur basil bella bruno carla carmen cecil clara conrad cora
    cyrus daisy daniel david diana doris edgar edith elias ella elsa emil emma ernest esther ethan eva felix
    fiona flora frank freya fritz george gloria grace greta gustav hanna harold hector helen henry hugo ida
    igor ingrid irene isaac ivan jacob james jasper jonas judith julia karl klara laura lena leo linus louis
    lucy magda maria martha martin max mira nadia nina nora oscar otto paula peter ralph rosa ruth samuel
    sofia stella theo thomas ursula vera victor walter
    """
)

VALUES = _words(
    """
    acorn anchor apple arrow axe badge bagel banana barrel basket beetle bell blanket boot bottle bread
    bucket button cactus camera candle carrot cello cheese cherry chess clock coat coin compass crown cup
    dice donut drum eagle egg falcon feather fiddle fig flute fork frog garlic ginger glove goose grape
    guitar hammer harp hat helmet hen honey jacket jar kettle kiln kite knife ladder lamp lemon lily lion
    lobster magnet mango map marble melon mirror mitten mule needle nutmeg olive onion otter owl paddle
    parrot pear pencil pepper piano pillow plum potato rabbit radish saddle saucer spoon
    """
)

FILLER = _words(
    """
    a about above across after again against ago all almost along already also although always among an and
    another any are around as at away back be because been before began behind below beneath beside between
    beyond both bring broad busy but by called came can carry change clear close cloud cold come cool could
    country course cross crowd dark dawn day deep did distance do does done door down drift dry during dusk
    each early earth east easy either empty end enough even evening evenly ever every far fast fell felt few
    field finally fine first flat flow fog follow for forest found fresh from front full garden gate gave
    gentle give glad go gold gone good grass gray great green ground grow had half hall happen hard harvest
    has have he hear heavy held her here high hill him his hold home hour house how however if in inside
    instead into is island it its just keep kept kind known lake land large last late later lay lead leave
    left less let life light like line little long look loud low made main make many march may meadow mean
    meet might mild mill mist month moon more morning most mountain mouth move much must my narrow near
    nearly never new next night no none noon north not nothing now of off often old on once one only open or
    order other our out outside over own pass past path people perhaps place plain plan pond present quick
    quiet quite rain rather reach ready rest rise river road rock roof room round said same sand saw sea
    season see seem shade shadow shall she shore short should show side silent silver since sky slow slowly
    small smoke snow so soft some soon south spring square stand star steady step still stone stood stop
    storm story stream street strong such summer sun sure tall than
    """
)

VOCABULARY = (*MARKS, *KEYS, *VALUES, *FILLER)

BOS_ID, EOS_ID, PAD_ID, UNK_ID, ASK_ID = range(len(MARKS))
KEY_IDS = range(len(MARKS), len(MARKS) + len(KEYS))
VALUE_IDS = range(KEY_IDS.stop, KEY_IDS.stop + len(VALUES))
FILLER_IDS = range(VALUE_IDS.stop, len(VOCABULARY))

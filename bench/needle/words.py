"""The vocabulary: every token that documents, questions and answers are made of. Knows no grammar.

A word's id is its place in `WORDS`. Names and code words are put together from syllables, so that there are
many of them and none stands in a sentence that is only filler.
"""

from __future__ import annotations

from itertools import product
from string import ascii_letters, digits, punctuation

import numpy as np

UNKNOWN, SYSTEM, USER, ASSISTANT, END = SPECIAL = (
    "<|unknown|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
VOCAB_SIZE = 3072
"""Rows of the embedding: the words and a few unused ones."""


def _cut(text: str) -> list[str]:
    return text.split()


def _joined(starts: str, ends: str) -> list[str]:
    return [a + b for a, b in product(starts.split(), ends.split())]


GIVEN_NAMES = _joined(
    "Al Bel Cal Cor Dar Del Ed El Fen Gal Hal Hel Is Jas Kel Lor "
    "Mar Mel Nat Nor Or Per Quin Ros Sel Tal Ter Ul Val Vel Wil Yas",
    "a an ara eda en enna eric ia ian ina io ira isa on ora wyn",
)
SURNAMES = _joined(
    "Ash Bar Black Brad Cold Crom Dun East Fair Glen Green Har Hart Hazel High Hol "
    "Ken Lang Lin Lock Mal Marsh Mill Moss Oak Pem Rad Red Stan Thorn Wal Whit",
    "berg bourne bury by combe dale den ford gate ham hurst ley more stow well worth",
)
PLACES = _joined(
    "Aber Bal Carn Drum Esk Fin Gar Inver Kil Loch Mon Pen Strath Tor Usk Wem",
    "aven bay bost cliff fell garth holm isle kirk mouth ness point sand thwaite toft wick",
)
CODE_WORDS = _joined(
    "ba bi bo da do du fa fe fi ga go gu ka ko ku la le lu ma mi mu na ne nu pa pe pi ra re ro sa ta",
    "bel bin cor das den dor fan fil gan gos kan lem lis lon mar men mir nas nor pas rem ric ros sal "
    "sen sim tan tor van vek vor zul",
)
NOUNS = _cut(
    "anchor apple archive autumn bakery ballad barn basket beacon bell bench bird blanket boat book "
    "bottle bread bridge brook brush bucket candle canal carpet cart castle cellar chair chapel cherry "
    "clock cloud coast coat copper corner cottage cousin crane cup curtain desk ditch doctor donkey door "
    "dove drawer dress drum engine evening falcon farmer feather fence ferry field fire flag flute forest "
    "fountain fox garden gardener garment glass goat grain gravel guest hammer harbour hedge herring hill "
    "horse house hunter inn island jacket journey judge kettle key kitchen kite ladder lake lamp lantern "
    "lawn leaf ledge letter library lighthouse lodge loom map market meadow merchant miller mirror mist "
    "monk morning mountain museum needle nest night oar office orchard oven owl paddle painter pantry "
    "paper path pear pebble piano pier pillow pilot plough pocket pond porch potter quarry queen quilt "
    "rain reef ribbon river road roof rope sail sailor school seed shepherd ship shop shore singer smith "
    "snow soldier spoon spring stable stair stone storm stove stranger street summer table tailor teacher "
    "tent tide tower town train tree trunk tunnel valley vase village violin wagon wall watch water "
    "weaver well wheel wind window winter wool"
)
ADJECTIVES = _cut(
    "ancient bitter blue bright broad broken brown calm careful cheap clean clear cold crooked dark deep "
    "distant dry dusty early empty faint famous fine flat foreign fresh gentle golden good grey heavy "
    "hollow honest hungry idle iron kind large late lazy lonely long loud low lucky modest muddy narrow "
    "noble odd old open painted pale patient plain polite poor proud quiet rare rich rough round rusty "
    "sharp short silent silver simple slow small smooth soft square steady steep strange strong sweet "
    "tall thin tired usual warm weary white wide wild wise wooden yellow young"
)
PAST_VERBS = _cut(
    "admired answered avoided borrowed bought brought built called carried changed chose cleaned closed "
    "copied counted covered crossed described divided drew drove emptied entered expected filled finished "
    "followed forgot found gathered gave greeted guarded heard held hid hired ignored joined kept knew "
    "led left lifted loved made measured mended missed moved named needed noticed offered opened ordered "
    "painted passed praised prepared promised pulled pushed raised reached remembered repaired sang saw "
    "searched sold sent served shared showed sought stored studied swept thanked took tended touched "
    "trusted turned used valued visited warned washed watched wove wrote"
)
ADVERBS = _cut(
    "again almost always badly barely calmly carefully daily early easily everywhere finally gently "
    "gladly hardly here indeed kindly lately loudly neatly never nearly often once openly patiently "
    "politely proudly quickly quietly rarely sadly safely seldom silently slowly sometimes soon steadily "
    "suddenly there together twice usually warmly wisely"
)
PREPOSITIONS = _cut("above across against along among around behind below beneath beside beyond inside near")
FUNCTION_WORDS = _cut(
    "The the A a In in On on At at Of of is was are has had and but while before after until because that "
    "who with without from to for nobody Nobody everyone Everyone some Some every Every No no It it they "
    "They said asked thought new other first second third fourth fifth one two three four five code codes "
    "keeper What How many all them Near Before You you answer document user gives brief exact nonce "
    "number"
)
FACT_WORDS = _cut("gave sent give did whom how year years")
COUNTS = ("zero", "one", "two", "three", "four", "five")
ORDINALS = ("first", "second", "third", "fourth", "fifth")


def _words() -> tuple[str, ...]:
    """All tokens in the order of their ids, each once; `##x` continues a word that isn't one of ours."""
    letters = ascii_letters + digits
    pieces = [*punctuation, *letters, *(f"##{x}" for x in letters)]
    ours = [*FUNCTION_WORDS, *NOUNS, *ADJECTIVES, *PAST_VERBS, *ADVERBS, *PREPOSITIONS, *COUNTS]
    names = [*GIVEN_NAMES, *SURNAMES, *PLACES, *CODE_WORDS]
    return tuple(dict.fromkeys([*SPECIAL, *pieces, *ours, *names, *FACT_WORDS]))


WORDS = _words()
ID_OF = {word: i for i, word in enumerate(WORDS)}


def ids(words: list[str] | str) -> np.ndarray:
    """The ids of words, (n,) int32; a string is cut at spaces."""
    return np.array([ID_OF[w] for w in (words.split() if isinstance(words, str) else words)], np.int32)


def text(word_ids: np.ndarray) -> str:
    """Words with a space between them, and none before punctuation; the tokenizer's inverse."""
    out: list[str] = []
    for i in word_ids.tolist():
        word = WORDS[i]
        out.append(word if not out or word in ".,;:?" else f" {word}")
    return "".join(out)

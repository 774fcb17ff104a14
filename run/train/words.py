"""The lexicon of the tasks: common words, each one token of the bundled tokenizer.

A word is a token with a space before it, and those of SPOKEN without one too: they begin sentences, and stand in the
JSON of answers and calls. A word added here is not one token before the tokenizer is trained anew.
"""

from __future__ import annotations

import random

NAMES = tuple(
    """
Adam Alice Anna Ben Carla Clara Daniel David Emil Emma Eva Felix Fiona Frank Greta Hanna Hugo
Ida Iris Ivan Jack James Julia Karl Kate Laura Lena Leo Linda Lucas Lucy Maria Mark Marta Max Maya Mia
Nina Noah Nora Olga Oscar Otto Paul Peter Petra Rita Robert Rosa Ruth Sam Sara Simon Sofia Tom Victor
""".split()
)
CITIES = tuple(
    """
Athens Berlin Boston Cairo Delhi Dublin Lima Lisbon London Madrid Milan Oslo Paris Prague
Rome Seoul Sydney Tokyo Vienna Warsaw
""".split()
)
COLOURS = tuple("black blue brown green grey orange pink purple red white yellow".split())
THINGS = tuple(
    """
bag ball bed bell bike boat book bottle box car chair clock coat cup desk door hat key knife lamp map
mirror phone piano ring ship shirt shoe sofa table train watch
""".split()
)
FOODS = tuple("apple banana bread butter cake cheese coffee fish honey milk pear pizza rice salt soup tea".split())
ANIMALS = tuple("bear bird cat cow dog duck horse mouse rabbit sheep".split())
PLACES = tuple("bank cellar church garden harbour kitchen library market museum office park school".split())
JOBS = tuple("actor baker cook doctor driver farmer nurse painter pilot teacher".split())
ADJECTIVES = tuple(
    """
big bright cheap clean cold dark dry fast good happy heavy hot large late light long loud new old quiet
sad short slow small soft strong tall warm young
""".split()
)
VERBS = tuple("eats finds jumps moves plays reads runs sells sings sits sleeps stands waits walks".split())

SPOKEN = NAMES + CITIES + COLOURS + THINGS + FOODS + JOBS + PLACES
"""Words that are one token without a space before them too."""

LEXICON = SPOKEN + ANIMALS + ADJECTIVES + VERBS


def invented(rng: random.Random) -> str:
    """A name of two or three syllables that nobody has."""
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))).capitalize()

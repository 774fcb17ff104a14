"""The lexicon of the tasks: common words, each one token of the bundled tokenizer.

A word is a token with a space before it, and those of SPOKEN without one too: they begin sentences, and stand in the
JSON of answers and calls. A word added here is not one token before the tokenizer is trained anew.
"""

from __future__ import annotations

NAMES = tuple(
    """
Adam Alice Anna Anton Ben Boris Carla Carol Clara Daniel David Diana Emil Emma Eva Felix Fiona Frank Greta Hanna Hugo
Ida Igor Ines Iris Ivan Jack James Jana Julia Karl Kate Laura Lena Leo Linda Lucas Lucy Maria Mark Marta Max Maya Mia
Nina Noah Nora Olga Oscar Otto Paul Peter Petra Rita Robert Rosa Ruth Sam Sara Simon Sofia Tom Vera Victor
""".split()
)
CITIES = tuple(
    """
Athens Berlin Boston Cairo Delhi Dublin Geneva Lima Lisbon London Madrid Milan Moscow Munich Oslo Paris Porto Prague
Rome Seoul Sydney Tokyo Vienna Warsaw
""".split()
)
COLOURS = tuple("black blue brown green grey orange pink purple red white yellow".split())
THINGS = tuple(
    """
bag ball bed bell bike boat book bottle box car chair clock coat cup desk door drum flag hat key kite knife lamp map
mirror phone piano plate ring rope ship shirt shoe sofa table train vase watch
""".split()
)
FOODS = tuple(
    "apple banana bread butter cake cheese coffee fish honey juice lemon milk pear pizza rice salt soup tea".split()
)
ANIMALS = tuple("bear bird cat cow dog duck fox goat horse mouse rabbit sheep".split())
PLACES = tuple("attic bank cellar church garden hall harbour kitchen library market museum office park school".split())
JOBS = tuple("actor baker cook dentist doctor driver farmer lawyer nurse painter pilot teacher".split())
ADJECTIVES = tuple(
    """
big bright calm cheap clean cold dark dry fast good happy heavy hot kind large late light long loud new nice old quiet
rich round sad short slow small soft strong tall thin warm wet wild young
""".split()
)
VERBS = tuple(
    "eats finds hears jumps moves needs paints plays reads runs sells sings sits sleeps stands waits walks".split()
)

SPOKEN = NAMES + CITIES + COLOURS + THINGS + FOODS + JOBS
"""Words that are one token without a space before them too."""

LEXICON = SPOKEN + ANIMALS + PLACES + ADJECTIVES + VERBS

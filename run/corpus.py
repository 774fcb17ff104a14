"""What the bundled tokenizer is made from: words and fixed phrases that are one token, and English to learn the rest.

A vocabulary of a thousand holds what its model is trained on, and little else: other words are spelt in pieces, other
scripts in bytes.
"""

from __future__ import annotations

from run.train.words import LEXICON, SPOKEN

# Words of the tasks' sentences beside the lexicon, with a space before them.
_WORDS = """
A a about actors again age alarm am an and answer answered are as assistant at block blocks bottom cache came can centre
circle city code colour costs cross DeepSeek do does draft eat explain fields figure figures first food foods for friend
from gateway get has have helpful hour how I in into is It its job JSON know larger last left like likes lines list live
lives look many me meet message messages minus model much My name near need needed not note number of off on open or
order owner paid person picture place plus price prices question quota replica right robot room see send sent sentence
set Shoal should smaller Spanish square steps text The the them thing things This this time times to token tokens tool
tools top triangle want was We weather welcome went What what which with words work years you
"""
# With none before them: at the beginning of texts and lines, and in JSON.
_BARE = """
age Answer array boolean Buy buy Can city colour Compute Copy Count Describe direction done down Dutch Extract false
find_phone food foods French German get_price get_time get_weather Give Hello Hi hot hour How integer It items job
json_object language left library message minute Move move_robot My name Note number object on open Order order_food
paid Paint paint place price prices properties Read Remember Repeat Replace required Reverse right Say Send send_message
Set set_alarm set_light Shoal Spanish string Tell text Thanks The There thing This Translate translate true Turn type up
Use What Where Which Who Write You Your
"""
_MARKS = ("...", "\n\n", ".\n", "?\n", ":\n", ".\n\n", "?\n\n", " =", " +", " -", " *")

# The fixed text of the official template (spec recipe.md §3.1), cut where its control tokens stand, or values do.
TEMPLATE = (
    "Reasoning Effort: ",
    " (range 1-100, the higher the value, the more thorough the reasoning)\n\n",
    "## Tools\n\nYou have access to a set of tools to help answer the user's question. You can invoke tools by "
    'writing a "<',
    ' calls>" block like the following:\n\n<',
    " calls>\n<",
    " calls>",
    ' invoke name="$TOOL_NAME">\n<',
    ' parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</',
    " parameter>\n...\n</",
    ' invoke name="$TOOL_NAME2">\n...\n</',
    ' calls>\n\nString parameters should be specified as is and set `string="true"`. For all other types (numbers, '
    'booleans, arrays, objects), pass the value in JSON format and set `string="false"`.\n\nIf thinking_mode is '
    "enabled (triggered by ",
    "), you MUST output your complete reasoning inside ",
    " BEFORE any tool calls or final response.\n\nOtherwise, output directly after ",
    " with tool calls or final response.\n\n### Available Tool Schemas\n\n",
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n",
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n",
    "\n\n<",
    ' invoke name="',
    '">\n<',
    ' parameter name="',
    '" string="true">',
    '" string="false">',
    "</",
    " parameter>\n<",
    " parameter>\n</",
    " invoke>\n<",
    " invoke>\n</",
    "<tool_result>",
    "</tool_result>",
)
_JSON = (
    '", "description": "',
    '", "parameters": {"type": "object", "properties": {"',
    '{"type": "object", "properties": {"',
    '": {"type": "',
    '"}}, "required": ["',
    '"]}}',
    '"]}',
    '{"',
    '": "',
    '", "',
    '": ',
    ', "',
    '"}',
    '"}, "',
    '"}}',
    '"}, {"',
    '": [{"',
    '": ["',
    '"], "',
    '"]',
    '}, {"',
    '}, "',
    "}]}",
    '}], "',
    '": {"',
    '", "enum": ["',
    '"]}, "',
    "}}",
)

# Frequent English words, the most frequent first; each is repeated as often as its rank deserves.
_ENGLISH = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one
you were all her she there would their we him been has when who will no more if out so up said what its about than
into them can only other time new some could these two may first then do any like my now over such our man me even
most made after also did many before must through years where much your way well down should because each just those
people how too little state good very make world still see own work long both between get know here day same think
another while last might us great old year off come since against go came right used take three use place small
found going never made most question answer token model request system memory server message key value block window
state layer data number list line word name type text file code test path error result return input output value
array string index order start end next step second minute hour night morning house water light hand head eye
side country school part case point group problem fact week company change help idea move play turn call show need
feel become leave put mean keep let begin seem talk tell ask learn read write run walk stand lose pay meet include
continue set follow stop create speak allow add spend grow open win offer remember love consider appear buy wait
serve die send expect build stay fall cut reach kill remain suggest raise pass sell require report decide pull
explain hope develop carry break thank receive agree support hit produce eat cover catch draw choose cause different
important large big high low young early public able late hard real best better sure free clear full special easy
strong possible whole certain true local short single common simple similar
"""


def phrases() -> list[str]:
    """Texts that are cut out as they stand, wherever they stand: the template's, and the frame of JSON; longest
    first."""
    return sorted((*TEMPLATE, *_JSON), key=len, reverse=True)


def whole() -> list[str]:
    """The texts of one token each."""
    spaced = (f" {word}" for word in (*LEXICON, *_WORDS.split()))
    bare = (*SPOKEN, *_BARE.split())
    return list(dict.fromkeys((*phrases(), *spaced, *bare, *_MARKS)))


def texts() -> list[str]:
    """English for the merges of other words, always the same."""
    pieces = list[str]()
    for rank, word in enumerate(_ENGLISH.split()):
        num_times = max(4, 60 // (1 + rank // 8))
        pieces += [f" {word}"] * num_times + [word.capitalize()] * (num_times // 4)
    return pieces

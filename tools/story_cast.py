"""The cast of the story grammar: the people, things and places of stories, and their inflections.

`SLOTS` maps a slot (`hero`, `thing`, `place`) to the items that may fill it. An item is a mapping of grammatical forms,
so agreement means looking up the right form: `{hero.his}`, `{thing.was}`, `{place.in}`. A new name, thing or place is
one more word in a list here.
"""

from collections.abc import Mapping

Item = Mapping[str, str]  # the forms of one member of the cast; the form "" is its plain name


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _rows(table: str) -> list[list[str]]:
    """Split a table into cells: one row per line, cells separated by bars."""
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]


def _simple(nouns: str) -> tuple[Item, ...]:
    """Read a comma-separated list; the form "a" carries the article."""
    return tuple({"": noun, "a": _with_article(noun)} for noun in nouns.split(", "))


def _people(names: str, he: str, him: str, his: str) -> tuple[Item, ...]:
    return tuple({"": name, "he": he, "him": him, "his": his, "self": f"{him}self"} for name in names.split())


def _single(nouns: str) -> tuple[Item, ...]:
    forms = {"it": "it", "was": "was", "is": "is", "this": "this"}
    return tuple({"": noun, "a": _with_article(noun), **forms} for noun in nouns.split(", "))


def _plural(nouns: str) -> tuple[Item, ...]:
    forms = {"it": "them", "was": "were", "is": "are", "this": "these"}
    return tuple({"": noun, "a": f"some {noun}", **forms} for noun in nouns.split(", "))


def _places(table: str) -> tuple[Item, ...]:
    """Read one place per line: its name, the preposition for being there and the one for going there."""
    return tuple({"": name, "in": f"{at} {name}", "to": f"{towards} {name}"} for name, at, towards in _rows(table))


def _obstacles(table: str) -> tuple[Item, ...]:
    """Read one obstacle per line: its name, and how it is overcome."""
    return tuple({"": name, "a": _with_article(name), "solved": solved} for name, solved in _rows(table))


def _skills(verbs: str) -> tuple[Item, ...]:
    return tuple({"": base, "ing": ing} for base, ing in (verb.split("/") for verb in verbs.split(", ")))


PEOPLE = (
    *_people("Mia Lily Rosa Clara Nora Ella Ruby Luna", "she", "her", "her"),
    *_people("Tom Otto Felix Hugo Leo Max Oscar Finn", "he", "him", "his"),
)
KINDS = _simple(
    "fox, rabbit, mouse, bear, hedgehog, owl, otter, badger, squirrel, cat, puppy, duck, goose, frog, turtle, deer, "
    "beaver, dragon, penguin, robot, baker, sailor, wizard, knight"
)
TRAITS = _simple(
    "brave, shy, clever, curious, kind, gentle, cheerful, stubborn, quiet, tiny, friendly, helpful, patient, careful, "
    "dreamy, lively, sleepy, funny, wise, proud, small, silly, polite, merry, bold, modest, thoughtful, playful"
)
THINGS = (
    *_single("red kite, silver key, golden bell, wooden boat, blue lantern, old map, striped scarf, tin drum"),
    *_single("paper crown, glass marble, music box, picture book, brass compass, little flute, iron teapot"),
    *_single("green umbrella, orange balloon, yellow hat, pearl button, velvet cloak, magic pebble"),
    *_single("clay whistle, purple ribbon, tiny telescope, wooden spoon, white feather, copper ring"),
    *_plural("magic seeds, red boots, silver skates, warm mittens, crystal beads, golden coins, blue slippers"),
)
HOMES = _simple(
    "in a quiet village, in a small cottage, in a tall lighthouse, at the edge of a great forest, on a little island, "
    "in a house by the sea, on a green hill, under an old oak tree, near a sleepy harbor, beside a clear lake, "
    "in a narrow street, in a faraway kingdom, in a valley full of flowers, behind the old mill, in a snowy town, "
    "high in the mountains"
)
PLACES = _places("""
    the dark forest     | in | into
    the windy hill      | on | up
    the long beach      | on | down to
    the old castle      | in | to
    the frozen lake     | at | to
    the busy market     | at | to
    the deep valley     | in | down into
    the misty swamp     | in | into
    the hidden garden   | in | to
    the tall tower      | in | up
    the crystal cave    | in | into
    the stone bridge    | on | to
    the sunny meadow    | in | to
    the silent desert   | in | into
    the great library   | in | to
    the snowy mountain  | on | up
    the ruined temple   | in | to
    the apple orchard   | in | to
    the rocky shore     | on | to
    the railway station | at | to
    the moonlit island  | on | to
    the empty mine      | in | down into
    the royal palace    | at | to
    the whispering woods | in | into
""")
OBSTACLES = _obstacles("""
    wide river      | built a raft from old branches and floated across
    steep cliff     | tied a rope to a tree and climbed up slowly
    fallen tree     | crawled under the branches
    locked gate     | found a rusty key under a stone and opened it
    sleeping giant  | tiptoed past without a sound
    thick fog       | followed the sound of a distant bell
    deep pond       | jumped from stone to stone
    angry goose     | offered it a piece of bread
    dark tunnel     | lit a candle and walked straight ahead
    thorny hedge    | made a small hole and slipped through
    broken bridge   | laid a long plank over the gap
    grumpy troll    | told it a funny joke until it laughed
    high wall       | stacked some boxes and climbed over
    swarm of bees   | waited until the last of them had flown away
    great snowdrift | dug a narrow path through the snow
    maze of rocks   | marked every corner with a piece of chalk
""")
SKILLS = _skills(
    "swim/swimming, paint/painting, dance/dancing, sing/singing, whistle/whistling, juggle/juggling, skate/skating, "
    "read/reading, sew/sewing, bake bread/baking bread, play the violin/playing the violin, tell jokes/telling jokes, "
    "climb trees/climbing trees, ride a bicycle/riding a bicycle, count to a hundred/counting to a hundred, "
    "write poems/writing poems, cook soup/cooking soup, build boats/building boats"
)
FOES = _simple("greedy magpie, sly weasel, grumpy ogre, hungry wolf, jealous crow, lonely giant, wicked witch, raven")
FOODS = _simple(
    "apple pie, honey bread, pumpkin soup, cheese sandwiches, berry cake, cherry pie, plum jam, fresh pancakes, "
    "vegetable stew, ginger cookies, buttered toast, roasted chestnuts"
)
SLOTS: Mapping[str, tuple[Item, ...]] = {
    "hero": PEOPLE,
    "friend": PEOPLE,
    "kind": KINDS,
    "fkind": KINDS,
    "trait": TRAITS,
    "ftrait": TRAITS,
    "thing": THINGS,
    "home": HOMES,
    "place": PLACES,
    "obstacle": OBSTACLES,
    "trial": OBSTACLES,
    "skill": SKILLS,
    "foe": FOES,
    "food": FOODS,
}
DISTINCT = (("hero", "friend"), ("kind", "fkind"), ("trait", "ftrait"), ("obstacle", "trial"))  # never the same item

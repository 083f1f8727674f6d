"""Generates stories from the story grammar and recognises its sentences: the demo model's teacher and judge.

This module decides what a whole story is (`PLOTS`: which sentences follow which), what a conversation about stories is,
and what counts as a sentence. `generate_story` walks the tables of `story_cast` and `story_rules` forwards, with a cast
drawn once per story. `parses` walks the same tables backwards, so the two cannot drift apart: it narrows the candidates
for each slot as it reads, and "Mia lost his kite." fails because no item in the tables is both called Mia and "his".
A sentence begins with a capital letter; apart from that, it is exactly what the tables say.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from tools.story_cast import SLOTS, Item
from tools.story_rules import RULES

Cast = Mapping[str, Item]
Candidates = Mapping[str, tuple[Item, ...]]  # the items that may still fill each slot, given what has been read
Part = tuple[str, bool]  # a piece of a text, and whether it is a symbol
Message = dict[str, str]
Exchanges = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]  # questions, and answers that suit each of them


@dataclass(frozen=True)
class Request:
    """A user's request: the question, the words that the story must contain, and the cast with these words."""

    question: str
    asked: tuple[str, ...]
    size: str
    cast: Cast

    def granted_by(self, story: str) -> bool:
        return all(re.search(rf"\b{re.escape(words)}\b", story, re.IGNORECASE) for words in self.asked)


# Slots that are never filled with the same item.
DISTINCT = (("hero", "friend"), ("kind", "fkind"), ("trait", "ftrait"), ("obstacle", "trial"))

Group = tuple[tuple[str, ...], bool]  # beats that belong together, and whether they may be left out


def _plot(text: str) -> tuple[Group, ...]:
    """Parse a sequence of beats; "?" marks an optional beat, "+" joins beats that make sense only together."""
    return tuple((tuple(group.rstrip("?").split("+")), group.endswith("?")) for group in text.split())


TINY_PLOT = _plot("opening gist moral? ending?")
PLOTS = (
    _plot(  # something is lost and found again
        "opening nature? treasure? weather? lose worry? depart travel? block+solve? night? travel? block2+solve2? find "
        "keep? joy? moral? ending"
    ),
    _plot(  # a friend helps to find it
        "opening nature? treasure? lose worry? depart? travel? meet ask+answer? offer? block+solve? night? findboth "
        "keep? thanks? feast? moral? together"
    ),
    _plot(  # a thief repents
        "opening nature? weather? treasure steal worry? depart travel? block+solve? night? block2+solve2? confront? "
        "repent keep? joy? feast? moral? ending"
    ),
    _plot(  # a journey of discovery
        "opening nature? weather? wonder depart travel? block+solve? night? travel? block2+solve2? discover keep? joy? "
        "moral? ending"
    ),
    _plot(  # something is learned
        "opening nature? wish fail? fail? weather? meet ask+answer? offer? practice practice? succeed joy? thanks? "
        "feast? moral? together"
    ),
    _plot(  # somebody is rescued
        "opening nature? treasure? cry depart travel? block+solve? night? block2+solve2? rescue pleased? feast? moral? "
        "together"
    ),
    _plot(  # a friend is found
        "opening nature? alone weather? depart? travel? meet ask+answer? play play? joy? feast? thanks? moral? together"
    ),
    _plot(  # a gift for a friend
        "opening nature? birthday weather? depart travel? block+solve? night? discover give pleased? joy? feast? "
        "moral? together"
    ),
)
BEATS = tuple(dict.fromkeys(beat for plot in (TINY_PLOT, *PLOTS) for beats, _ in plot for beat in beats))
SIZES = {"": (2, 15), "short ": (2, 4), "long ": (10, 15)}  # how many sentences a story of that size has

# --- the chat -----------------------------------------------------------------------------------------------------

TOPICS = (
    "{kind.a} named {hero}",
    "{trait.a} {kind}",
    "{trait.a} {kind} named {hero}",
    "{kind.a} and {fkind.a}",
    "{hero} and {friend}",
    "{hero} the {kind}",
    "{kind.a} and {thing.a}",
    "{thing.a}",
    "{place}",
    "{kind.a} who lived {home}",
    "{kind.a} who wanted to {skill}",
)
FIRST_REQUESTS = (
    "Tell me a {size}story about {topic}.",
    "Tell me a {size}story about {topic}, please.",
    "Please tell me a {size}story about {topic}.",
    "Can you tell me a {size}story about {topic}?",
    "I would like a {size}story about {topic}.",
    "Write a {size}story about {topic}.",
    "Do you know a {size}story about {topic}?",
)
NEXT_REQUESTS = (
    "Tell me another one about {topic}.",
    "Now a {size}story about {topic}, please.",
    "And one about {topic}?",
    "Thank you! Can I have another {size}story, about {topic}?",
)
GREETINGS = (
    (("Hello!", "Hi!", "Hi there.", "Good morning!", "Hello", "Hi"), ("Hello! Shall I tell you a story?", "Hello!")),
    (
        ("Who are you?", "What are you?", "What is your name?", "What can you do?", "Can you help me?"),
        ("I am a very small language model, and I tell stories.", "I tell stories, and that is all I can do."),
    ),
    (("How are you?", "How are you today?"), ("I am fine, thank you. Would you like to hear a story?",)),
    (
        ("What is the capital of France?", "What is two plus two?", "Write a program.", "What time is it?"),
        ("I do not know. I can only tell stories.", "That is too hard for me, but I could tell you a story."),
    ),
)
THANKS = (
    (
        ("Thank you!", "Thanks!", "That was nice.", "I liked that.", "What a good story!"),
        ("You are welcome! I know many more stories.", "I am glad that you liked it."),
    ),
)


# --- forwards: telling --------------------------------------------------------------------------------------------


@cache
def _parts(text: str) -> tuple[Part, ...]:
    pieces = re.split(r"\{([\w.]+)\}", text)
    return tuple((piece, index % 2 == 1) for index, piece in enumerate(pieces) if piece)


def _fill(text: str, cast: Cast, rng: random.Random) -> str:
    return "".join(_expand(piece, cast, rng) if symbol else piece for piece, symbol in _parts(text))


def _expand(symbol: str, cast: Cast, rng: random.Random) -> str:
    slot, _, form = symbol.partition(".")
    return cast[slot][form] if slot in SLOTS else _fill(rng.choice(RULES[symbol]), cast, rng)


def _first_letter(text: str, change: Callable[[str], str]) -> str:
    """Return the text with its first letter changed, even after an opening quotation mark."""
    at = 1 if text.startswith('"') else 0
    return text[:at] + change(text[at : at + 1]) + text[at + 1 :]


def draw_cast(rng: random.Random) -> Cast:
    while True:
        cast = {slot: rng.choice(items) for slot, items in SLOTS.items()}
        if all(cast[one][""] != cast[two][""] for one, two in DISTINCT):
            return cast


def _outline(rng: random.Random, sentences: int) -> list[str]:
    """Return the beats of a story with at most this many sentences."""
    fitting = [plot for plot in PLOTS if sum(not optional for _, optional in plot) <= sentences]
    plot = rng.choice(fitting or [TINY_PLOT])
    kept = {index for index, (_, optional) in enumerate(plot) if not optional}
    room = sentences - len(kept)
    for index in rng.sample(range(len(plot)), len(plot)):
        if index not in kept and len(plot[index][0]) <= room:
            kept.add(index)
            room -= len(plot[index][0])
    return [beat for index in sorted(kept) for beat in plot[index][0]]


def _tell(cast: Cast, rng: random.Random, sentences: int) -> str:
    told: list[str] = []
    used: set[str] = set()
    for beat in _outline(rng, sentences):
        text = rng.choice([text for text in RULES[beat] if text not in used])
        used.add(text)
        told.append(_first_letter(_fill(text, cast, rng), str.upper))
    return " ".join(told)


def generate_story(rng: random.Random) -> str:
    return _tell(draw_cast(rng), rng, rng.randint(*SIZES[""]))


def _turn(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def draw_request(rng: random.Random, requests: tuple[str, ...] = FIRST_REQUESTS) -> Request:
    request, topic = rng.choice(requests), rng.choice(TOPICS)
    size = rng.choice(list(SIZES)) if "{size}" in request else ""
    cast = draw_cast(rng)
    asked = tuple(cast[slot][""] for slot in re.findall(r"\{(\w+)", topic))
    return Request(_fill(request.replace("{size}", size).replace("{topic}", topic), cast, rng), asked, size, cast)


def _story_on_request(rng: random.Random, requests: tuple[str, ...]) -> list[Message]:
    request = draw_request(rng, requests)
    story = ""
    while not request.granted_by(story):
        story = _tell(request.cast, rng, rng.randint(*SIZES[request.size]))
    return _turn(request.question, story)


def _small_talk(rng: random.Random, exchanges: Exchanges) -> list[Message]:
    questions, answers = rng.choice(exchanges)
    return _turn(rng.choice(questions), rng.choice(answers))


def generate_chat(rng: random.Random) -> list[Message]:
    """Generate a conversation: sometimes small talk, then a story on request, and sometimes a second story."""
    chat = _small_talk(rng, GREETINGS) if rng.random() < 0.2 else []
    chat += _story_on_request(rng, FIRST_REQUESTS)
    if rng.random() < 0.3:
        chat += _story_on_request(rng, NEXT_REQUESTS)
    return chat + (_small_talk(rng, THANKS) if rng.random() < 0.1 else [])


# --- backwards: reading -------------------------------------------------------------------------------------------


def _read(text: str, at: int, parts: tuple[Part, ...], cast: Candidates) -> Iterator[tuple[int, Candidates]]:
    """Yield every way to read the parts from `at`: where the reading ends, and the candidates of each slot read."""
    if not parts:
        yield at, cast
        return
    (piece, is_symbol), rest = parts[0], parts[1:]
    for end, narrowed in _read_symbol(text, at, piece, cast) if is_symbol else _read_literal(text, at, piece, cast):
        yield from _read(text, end, rest, narrowed)


def _read_literal(text: str, at: int, literal: str, cast: Candidates) -> Iterator[tuple[int, Candidates]]:
    if text.startswith(literal, at):
        yield at + len(literal), cast


def _read_symbol(text: str, at: int, symbol: str, cast: Candidates) -> Iterator[tuple[int, Candidates]]:
    slot, _, form = symbol.partition(".")
    if slot not in SLOTS:
        for alternative in dict.fromkeys(RULES[symbol]):
            yield from _read(text, at, _parts(alternative), cast)
        return
    candidates = cast.get(slot, SLOTS[slot])
    for word in {item[form]: None for item in candidates if text.startswith(item[form], at)}:
        yield at + len(word), {**cast, slot: tuple(item for item in candidates if item[form] == word)}


def _consistent(cast: Candidates) -> bool:
    """Whether different items can be drawn for the slots that must differ."""
    pairs = ((cast.get(one, SLOTS[one]), cast.get(two, SLOTS[two])) for one, two in DISTINCT)
    return all(len(first) > 1 or len(second) > 1 or first[0][""] != second[0][""] for first, second in pairs)


def parses(sentence: str) -> bool:
    """Whether the grammar can produce this sentence, as one sentence of a story."""
    if _first_letter(sentence, str.upper) != sentence:
        return False
    readings = (
        (text, reading)
        for text in dict.fromkeys((sentence, _first_letter(sentence, str.lower)))
        for beat in BEATS
        for reading in _read_symbol(text, 0, beat, {})
    )
    return any(end == len(text) and _consistent(cast) for text, (end, cast) in readings)


def split_sentences(text: str) -> list[str]:
    """Split a story into sentences; quoted speech belongs to the sentence around it."""
    sentences, start = [], 0
    for stop in re.finditer(r'[.!?]"?(?=\s+["A-Z]|\s*$)', text):
        if text.count('"', start, stop.end()) % 2 == 0:
            sentences.append(text[start : stop.end()].strip())
            start = stop.end()
    rest = text[start:].strip()
    return [*sentences, rest] if rest else sentences

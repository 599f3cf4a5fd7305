"""Write the small corpus, conversations and the tokenizer of the package, or check that the shipped files are current.

    python tools/make_corpus.py            # write torchtitan_npu/assets/{corpus,chat,tokenizer}
    python tools/make_corpus.py --check    # exit 1 and name the file if a shipped file differs

The text comes from a probabilistic grammar: stories, letters, lists, sums, directions and more. Each document draws
its own people, things and numbers and is consistent: names recur, totals are sums, directions are correct. Prices, the
map and the animals are the same in all documents. So a model can learn dependencies of every length, but never the
random draws themselves.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ASSETS = Path(__file__).resolve().parent.parent / "torchtitan_npu" / "assets"
# File, seed, size in bytes. The validation text has the same grammar; no document is in both.
CORPORA = [("corpus.jsonl", 2025, 920_000), ("validation.jsonl", 2026, 60_000)]
# File, seed, conversations.
CHATS = [("chat.jsonl", 2027, 400), ("validation.jsonl", 2028, 60)]
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
# TorchTitan's debug models have 2048 ids. The last eight are free for models with additional tokens.
VOCAB_SIZE = 2040

T = TypeVar("T")


# --- words ------------------------------------------------------------------------------------------------------------


def words(line: str) -> list[str]:
    return line.split()


SHE = words(
    "Ada Bella Clara Dora Edith Flora Greta Hanna Ida June Kara Lena Mara Nora Olga Petra Rosa Signe Tilda Vera"
)
HE = words(
    "Abel Boris Caleb Dario Emil Felix Gustav Hugo Ivan Jonas Karl Leo Milo Nils Otto Paul Ralf Simon Theo Walter"
)
PET_NAMES = words("Pepper Button Clover Biscuit Mossy Thimble Pebble Ginger Nutmeg Bramble Cinder Marble Tansy Acorn")
TOWNS = words("Alderbrook Birchwick Coldharbour Dunmere Eastmoor Fernley Greywater Hollin Ironford Kestrel Larkfield")
SHIPS = words("Gull Swan Star Heron Thistle Lantern Marigold Comet")
TRADES = words(
    "baker carpenter miller tailor gardener potter fisher shepherd teacher clockmaker blacksmith weaver ferryman "
    "librarian cobbler painter beekeeper postman mason doctor sailor farmer glazier brewer"
)
MOODS = words(
    "cheerful patient stubborn curious careful brave clumsy gentle proud shy honest hasty clever thoughtful grumpy "
    "merry"
)
LOOKS = words("quiet small windy crooked busy sleepy narrow sunny old hidden lonely friendly foggy muddy dusty bright")
COLOURS = words("red blue green yellow white black brown grey orange purple silver golden")
MATERIALS = words("wooden copper tin brass leather woollen paper glass stone iron clay velvet")
THINGS = words(
    "kettle lantern basket umbrella violin ladder compass blanket mirror bucket clock hammer spoon scarf map drum "
    "bottle chair key bell rope hat teapot saddle needle candle book whistle anchor broom pillow wheel telescope ring "
    "trumpet"
)
DISHES = words("soup pie pudding bread stew porridge pancakes dumplings cake broth biscuits sauce")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
RANKS = words("first second third fourth fifth sixth seventh")
SMALL = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
TENS = words("zero ten twenty thirty forty fifty sixty seventy eighty ninety")
RHYMES = [
    words(line)
    for line in (
        "night light sight kite knight",
        "sea tree bee tea key",
        "rain lane train grain chain",
        "day hay way clay bay",
        "moon spoon tune noon",
        "hill mill quill till",
        "stone bone throne cone",
        "house mouse blouse grouse",
        "ground sound hound pound",
        "snow crow bow toe",
        "sand hand land band",
        "boat coat goat note throat",
    )
]
# Facts that hold in every document.
PRICES = {  # coins for one
    **{"apple": 2, "pear": 3, "onion": 1, "carrot": 1, "potato": 1, "lemon": 4, "cabbage": 5, "egg": 2, "loaf": 6},
    **{"cheese": 9, "sausage": 7, "candle": 3, "button": 1, "pencil": 2, "envelope": 1, "turnip": 2, "plum": 2},
    **{"leek": 3, "herring": 8, "bucket": 12, "rope": 10, "lamp": 15, "brush": 5, "needle": 1, "tomato": 3},
    **{"melon": 11, "cake": 14, "pumpkin": 8, "radish": 1, "cherry": 1},
}
GARDEN = words("apple pear onion carrot potato lemon egg turnip plum leek tomato pumpkin radish cherry")
PLURALS = {"loaf": "loaves", "potato": "potatoes", "tomato": "tomatoes", "brush": "brushes", "radish": "radishes"}
PLURALS |= {"cherry": "cherries", "pinch": "pinches"}
MEASURES = {  # unit
    **dict.fromkeys(words("flour milk water rice barley cream oats"), "cup"),
    **dict.fromkeys(words("sugar butter honey oil vinegar mustard jam"), "spoon"),
    **dict.fromkeys(words("salt pepper cinnamon thyme ginger"), "pinch"),
}
ANIMALS = {  # class, dwelling, food, legs, voice
    "heron": ("bird", "by the river", "fish", 2, "croaks"),
    "owl": ("bird", "in the barn", "mice", 2, "hoots"),
    "hen": ("bird", "in the yard", "grain", 2, "clucks"),
    "duck": ("bird", "on the pond", "weeds", 2, "quacks"),
    "crow": ("bird", "in the oak", "seeds", 2, "caws"),
    "toad": ("amphibian", "under the stones", "beetles", 4, "croaks"),
    "frog": ("amphibian", "in the marsh", "flies", 4, "croaks"),
    "bee": ("insect", "in the hive", "nectar", 6, "hums"),
    "ant": ("insect", "in the garden", "crumbs", 6, "makes no sound"),
    "cricket": ("insect", "in the meadow", "grass", 6, "chirps"),
    "spider": ("hunter", "in the attic", "flies", 8, "makes no sound"),
    "fox": ("mammal", "in the forest", "mice", 4, "barks"),
    "goat": ("mammal", "on the hill", "leaves", 4, "bleats"),
    "cat": ("mammal", "near the stove", "fish", 4, "purrs"),
    "dog": ("mammal", "at the gate", "bones", 4, "barks"),
    "donkey": ("mammal", "in the stable", "hay", 4, "brays"),
    "mouse": ("mammal", "behind the wall", "crumbs", 4, "squeaks"),
    "sheep": ("mammal", "on the moor", "grass", 4, "bleats"),
    "wolf": ("mammal", "in the mountains", "deer", 4, "howls"),
    "pony": ("mammal", "in the paddock", "oats", 4, "neighs"),
}
MAP = {  # streets east and north of the market
    **{"market": (0, 0), "church": (0, 2), "mill": (3, 1), "harbour": (-3, -2), "school": (1, 2), "bridge": (2, 0)},
    **{"inn": (-1, 1), "bakery": (1, -1), "well": (-2, 0), "library": (-1, 3), "forge": (2, -2), "orchard": (4, 3)},
    **{"station": (-4, 1), "theatre": (0, -3), "lighthouse": (-5, -3), "museum": (3, -1), "hospital": (-2, 2)},
    **{"castle": (5, 0)},
}
SKIES = {  # what to carry, lowest and highest degrees
    "rain": ("an umbrella", 6, 14),
    "sun": ("a straw hat", 15, 29),
    "fog": ("a lantern", 3, 11),
    "snow": ("a thick coat", -9, 1),
    "wind": ("a warm scarf", 4, 16),
    "cloud": ("a light jacket", 8, 18),
    "thunder": ("nothing of iron", 14, 24),
    "frost": ("woollen gloves", -6, 2),
    "drizzle": ("good boots", 5, 13),
}


def number(n: int) -> str:
    """Return ``n`` (0 to 999) in words."""
    if n < 20:
        return SMALL[n]
    if n < 100:
        return TENS[n // 10] + (f"-{SMALL[n % 10]}" if n % 10 else "")
    return SMALL[n // 100] + " hundred" + (f" and {number(n % 100)}" if n % 100 else "")


def many(n: int, noun: str) -> str:
    """Return a count with its noun: ``3 apples``, ``1 loaf``."""
    return f"{n} {noun if n == 1 else plural(noun)}"


def plural(noun: str) -> str:
    return PLURALS.get(noun, noun + "s")


def listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def way(here: str, there: str) -> str:
    """Return directions on the map, such as ``two streets east and one street south``."""
    (x0, y0), (x1, y1) = MAP[here], MAP[there]
    legs = [(x1 - x0, "east", "west"), (y1 - y0, "north", "south")]
    streets = [
        f"{number(abs(n))} {'street' if abs(n) == 1 else 'streets'} {plus if n > 0 else minus}"
        for n, plus, minus in legs
        if n
    ]
    return " and ".join(streets)


# --- dice -------------------------------------------------------------------------------------------------------------


class Dice:
    """Make all random choices, only with ``random()``, whose sequence Python guarantees."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def between(self, low: int, high: int) -> int:
        """Return an integer from ``low`` to ``high``, both included."""
        return low + int(self._random() * (high - low + 1))

    def maybe(self, chance: float) -> bool:
        return self._random() < chance

    def pick(self, items: Sequence[T]) -> T:
        return items[self.between(0, len(items) - 1)]

    def some(self, items: Sequence[T], n: int) -> list[T]:
        """Return ``n`` different items in random order."""
        left = list(items)
        return [left.pop(self.between(0, len(left) - 1)) for _ in range(n)]

    def tell(self, template: str, **values: Any) -> str:
        """Fill ``template``: choose from each ``[this|that]``, insert each ``{value}`` and resolve ``a(n)``."""
        while "[" in template:
            template = re.sub(r"\[([^\[\]]*)\]", lambda choice: self.pick(choice[1].split("|")), template)
        text = template.format(**values)
        return re.sub(r"\b([aA])\(n\)(?= (\w))", lambda m: m[1] + "n" * (m[2] in "aeiou"), text)


@dataclass
class Person:
    name: str
    they: str
    their: str
    them: str
    trade: str
    mood: str
    town: str
    pet: str
    kind: str
    colour: str


def people(dice: Dice, n: int) -> list[Person]:
    """Return ``n`` people with different names, trades and animals."""
    cast = []
    drawn = (dice.some(items, n) for items in (SHE + HE, TRADES, PET_NAMES, list(ANIMALS)))
    for name, trade, pet, kind in zip(*drawn, strict=True):
        pronouns = ("she", "her", "her") if name in SHE else ("he", "his", "him")
        cast.append(Person(name, *pronouns, trade, dice.pick(MOODS), dice.pick(TOWNS), pet, kind, dice.pick(COLOURS)))
    return cast


def things(dice: Dice, n: int) -> list[str]:
    """Return ``n`` different things, each with a colour or a material."""
    return [f"{dice.pick(COLOURS + MATERIALS)} {thing}" for thing in dice.some(THINGS, n)]


# --- stories ----------------------------------------------------------------------------------------------------------


def opening(dice: Dice, who: Person) -> str:
    return dice.tell(
        "[In the {look} town of {who.town} lived|Once there was in {who.town}, a(n) {look} town,|Long ago {who.town} "
        "was the home of] a(n) {who.mood} {who.trade} called {who.name}. [Every evening|At night|After work] "
        "{who.they} [sat|talked|shared {who.their} supper] with {who.their} {who.kind}, {who.pet}, which was "
        "[as {who.colour} as could be|{who.colour} from head to foot|{who.colour} all over].",
        who=who,
        look=dice.pick(LOOKS),
    )


def trading_story(dice: Dice) -> str:
    """Tell a chain of exchanges, and summarize it at the end."""
    n = dice.between(2, 8)
    who, *others = people(dice, n + 1)
    chain = things(dice, n + 1)
    found = (
        "One [morning|day|afternoon] {who.name} found a(n) {thing} [under the stairs|in the attic|in a drawer|on the "
        'beach]. "I have no use for it," {who.they} [said|thought], "but [someone|somebody in this town] will."'
    )
    exchange = (
        "[At|Near|In front of|Behind] the {place} {who.they} [met|saw|came upon] {other.name}, a(n) {other.mood} "
        "{other.trade} who [needed|was looking for|had always wanted] a(n) {given}. "
        '"[Give me|Leave me] [that|your] {short}, and [you shall have|I will give you|take] my {got}," '
        "said {other.name}. [{who.name} agreed at once.|They shook hands on it.|"
        "{who.name} thought for a while and nodded.|It was a fair offer.]"
    )
    end = (
        "[When it grew dark|In the evening|At last] {who.name} [walked|went|came] home to {who.town}. "
        "{who.pet} the {who.kind} [was waiting at the door|was awake|looked up]. "
        '"[Listen|Look]," said {who.name}, "I began with a(n) {first}, and I got {steps}." '
        "[And that is how the {who.trade} of {who.town} came by a(n) {last}.|They laughed until the lamp went out.|"
        "{who.pet} had nothing to say to that.]"
    )
    story = [opening(dice, who), dice.tell(found, who=who, thing=chain[0])]
    for given, got, other, place in zip(chain, chain[1:], others, dice.some(list(MAP), n), strict=False):
        story.append(
            dice.tell(exchange, who=who, other=other, place=place, given=given, got=got, short=given.split()[-1])
        )
    steps = listed([f"a(n) {got} from {other.name}" for got, other in zip(chain[1:], others, strict=True)])
    story.append(dice.tell(end, who=who, first=chain[0], steps=steps, last=chain[-1]))
    return dice.pick(["\n", "\n\n", " "]).join(story)


def lost_pet_story(dice: Dice) -> str:
    """Tell a search from place to place. The animal is at its natural dwelling."""
    who, *asked = people(dice, dice.between(2, 6))
    _, dwelling, food, legs, voice = ANIMALS[who.kind]
    gone = (
        "[On a {day} in {month}|One {day}|Early on {day}] {who.pet} was gone. "
        "The [door stood open|bowl of {food} was still full|basket was empty]."
    )
    question = (
        "{who.name} [ran|hurried|walked] to the {place} and asked {other.name} the {other.trade}. "
        '"Have you seen a(n) {who.colour} {who.kind}?" "[No|I have not|Not today|Alas, no]," said {other.name}, '
        '"[all I saw was a(n) {other.colour} {other.kind}|but I heard something that {voice}|'
        'I was busy with a(n) {thing}]." '
        "[{who.name} thanked {other.them}.|{who.name} sighed.|So the search went on.]"
    )
    end = (
        "Then {who.name} remembered: a(n) {who.kind} lives {dwelling}. And [there|right there], {dwelling}, sat "
        "{who.pet} the {who.colour} {who.kind}, [all {legs} legs in the mud|eating {food}|fast asleep]. "
        "[{who.name} carried {who.pet} home to {who.town}.|{other.name} was told the same evening.|"
        "The {who.trade} of {who.town} never left the door open again.]"
    )
    story = [opening(dice, who), dice.tell(gone, who=who, day=dice.pick(DAYS), month=dice.pick(MONTHS), food=food)]
    for other, place in zip(asked, dice.some(list(MAP), len(asked)), strict=True):
        story.append(dice.tell(question, who=who, other=other, place=place, voice=voice, thing=things(dice, 1)[0]))
    story.append(dice.tell(end, who=who, other=asked[0], dwelling=dwelling, food=food, legs=number(legs)))
    return dice.pick(["\n", " "]).join(story)


def contest_story(dice: Dice) -> str:
    """Tell a race with times, and the ranking that follows from them."""
    cast = people(dice, dice.between(3, 7))
    minutes = dice.some(range(11, 60), len(cast))
    start, end = dice.some(list(MAP), 2)
    prize = things(dice, 1)[0]
    story = [
        dice.tell(
            "[Every {month}|Once a year|On the last {day} of {month}] there is a "
            "[rowing race|sack race|footrace|donkey race] in {town}, from the {start} to the {end}. "
            "The prize is a(n) {prize}.",
            month=dice.pick(MONTHS), day=dice.pick(DAYS), town=cast[0].town, start=start, end=end, prize=prize,
        )
    ]  # fmt: skip
    for who, m in zip(cast, minutes, strict=True):
        story.append(dice.tell("{who.name} the {who.trade} [took|needed|was there after] {m} minutes.", who=who, m=m))
    order = [who for _, who in sorted(zip(minutes, cast, strict=True), key=lambda pair: pair[0])]
    story.append(listed([f"{who.name} was {rank}" for who, rank in zip(order, RANKS, strict=False)]) + ".")
    end_of_it = "So the {first.trade} [won|took home] the {prize}, and [{last.name} came last|{first.pet} was proud]."
    story.append(dice.tell(end_of_it, first=order[0], last=order[-1], prize=prize))
    return " ".join(story)


def ship_log(dice: Dice) -> str:
    """Tell how a stock shrinks from day to day."""
    captain = people(dice, 1)[0]
    store = dice.pick(["barrels of water", "sacks of flour", "baskets of apples", "jars of honey"])
    left = dice.between(60, 99)
    log = [f"Log of the {dice.pick(SHIPS)}, captain {captain.name}. We sail from {captain.town} with {left} {store}."]
    for day in range(1, dice.between(3, 12)):
        used = dice.between(1, 5)
        left -= used
        sky = dice.pick(list(SKIES)).capitalize()
        entry = "Day {day}. {sky}. [We used|The crew used|Used] {used}, {left} {store} left."
        log.append(dice.tell(entry, day=day, sky=sky, used=used, left=left, store=store))
        if dice.maybe(0.15):
            log[-1] += dice.tell(" Saw a(n) {colour} sail.", colour=dice.pick(COLOURS))
    return "\n".join([*log, f"In harbour with {left} {store}. {captain.name}, captain."])


# --- letters and dialogue ---------------------------------------------------------------------------------------------


def letter(dice: Dice) -> str:
    me, you, third = people(dice, 3)
    good, n, sky = dice.pick(list(PRICES)), dice.between(2, 20), dice.pick(list(SKIES))
    matters = [
        "Thank you for the {thing}. It [stands|lies|hangs] [by the window|in the hall|next to my bed], and {me.pet} "
        "[sleeps beside it|is afraid of it|will not leave it alone].",
        "{third.name} the {third.trade} [visited|came to see] me on {day} and asked about you. "
        "[I said you were well.|We talked of the old days in {you.town}.|I promised to write.]",
        "The weather in {me.town} is all {sky}. One needs {carry} even to go to the {place}.",
        "My work as a(n) {me.trade} [goes well|is slow this month|keeps me busy until dark]. "
        "[Yesterday|Last week] I sold {n} {goods} for {total} coins.",
        "[Do you remember|Have you forgotten] the {place} where we [met|lost the {lost}]? "
        "They are [painting|selling] it.",
        "How is {you.pet}? [Does your {you.kind} still eat {food}|Is the {you.kind} as {you.colour} as ever]?",
        "I [shall come|am coming] to {you.town} on {day}, by the [noon|morning|evening] train. "
        "Please [wait for me|meet me] at the station.",
    ]
    text = "{me.town}, {date} {month}\n\nDear {you.name},\n\n" + " ".join(dice.some(matters, dice.between(1, 6)))
    text += "\n\n[Your friend|With love|Yours|Warmly],\n{me.name}"
    if dice.maybe(0.3):
        text += "\n\nP.S. {me.pet} the {me.kind} [sends greetings|says hello|greets {you.pet}] too."
    return dice.tell(
        text, me=me, you=you, third=third, date=dice.between(1, 28), month=dice.pick(MONTHS), day=dice.pick(DAYS),
        thing=things(dice, 1)[0], lost=dice.pick(THINGS), place=dice.pick(list(MAP)), sky=sky, carry=SKIES[sky][0], n=n,
        goods=plural(good), total=n * PRICES[good], food=ANIMALS[you.kind][2],
    )  # fmt: skip


def dialogue(dice: Dice) -> str:
    """Write questions and answers, and repeat all answers at the end."""
    asker, teller = people(dice, 2)
    colour, age, month, place = dice.pick(COLOURS), dice.between(18, 90), dice.pick(MONTHS), dice.pick(list(MAP))
    thing = things(dice, 1)[0]
    topics = [  # question, answer, what was learned
        ("where do you live", f"In {teller.town}", f"you live in {teller.town}"),
        ("what is your trade", f"I am a(n) {teller.trade}", f"you are a(n) {teller.trade}"),
        ("who is with you", f"{teller.pet}, my {teller.kind}", f"the {teller.kind} is called {teller.pet}"),
        ("what colour is your door", f"It is {colour}", f"your door is {colour}"),
        ("how old are you", f"I am {number(age)}", f"you are {number(age)}"),
        ("what do you carry", f"[Only|Just] a(n) {thing}", f"you carry a(n) {thing}"),
        ("when is your birthday", f"In {month}", f"your birthday is in {month}"),
        ("where are you going", f"To the {place}", f"you are going to the {place}"),
    ]
    chosen = dice.some(topics, dice.between(1, 7))
    lines = [f"{asker.name}: [Good morning|Hello|Good evening], {teller.name}.", f"{teller.name}: Hello, {asker.name}."]
    for question, answer, _ in chosen:
        lines += [f"{asker.name}: [And|Tell me,|Now,] {question}?", f"{teller.name}: {answer}."]
    lines.append(f"{asker.name}: So {listed([learned for _, _, learned in chosen])}.")
    lines.append(f"{teller.name}: [That is right|Quite so|You listen well], {asker.name}.")
    return dice.tell("\n".join(lines))


# --- numbers and the world --------------------------------------------------------------------------------------------


def shopping_list(dice: Dice) -> str:
    """Write a bill: counts, prices and the total."""
    goods = dice.some(list(PRICES), dice.between(2, 9))
    counts = [dice.between(1, 12) for _ in goods]
    costs = [n * PRICES[good] for n, good in zip(counts, goods, strict=True)]
    title = dice.tell(
        "[Shopping list|To buy|For the market|Things to buy] [for {name}|on {day}]:",
        name=dice.pick(SHE + HE),
        day=dice.pick(DAYS),
    )
    lines = [f"- {many(n, good)}: {cost}" for n, good, cost in zip(counts, goods, costs, strict=True)]
    return "\n".join([title, *lines, f"Total: {sum(costs)} coins"])


def sums(dice: Dice) -> str:
    lines = []
    for _ in range(dice.between(1, 10)):
        small, large = sorted((dice.between(0, 99), dice.between(0, 99)))
        x, y = dice.between(0, 12), dice.between(0, 12)
        lines.append(
            dice.pick(
                [f"{small} + {large} = {small + large}", f"{large} - {small} = {large - small}", f"{x} x {y} = {x * y}"]
            )
        )
    return "\n".join(lines)


def word_problem(dice: Dice) -> str:
    one, other = people(dice, 2)
    good = dice.pick(list(PRICES))
    x, y = dice.between(10, 60), dice.between(2, 9)
    return dice.tell(
        "[{one.name} has {x} {goods}. {other.name} the {other.trade} brings {y} more. "
        "Now there are {x} + {y} = {more} {goods}.|"
        "{one.name} had {x} {goods} and gave {y} to {other.name}. {one.name} has {x} - {y} = {less} left.|"
        "{one.name} the {one.trade} sells {y} {goods} for {y} x {price} = {cost} coins.|"
        "{one.name} and {other.name} share {even} {goods}. Each gets {x}, for {x} + {x} = {even}.]",
        one=one, other=other, goods=plural(good), x=x, y=y, more=x + y, less=x - y, price=PRICES[good],
        cost=y * PRICES[good], even=2 * x,
    )  # fmt: skip


def counting(dice: Dice) -> str:
    step, start = dice.pick([1, 1, 1, 2, 3, 5, 10]), dice.between(2, 40)
    run = [start + i * step for i in range(dice.between(4, 16))]
    if dice.maybe(0.4):
        run.reverse()
    if dice.maybe(0.5):
        thing = plural(dice.pick(THINGS))
        return ", ".join(f"{number(n)} {thing}" for n in run).capitalize() + "."
    return f"Count {'up' if run[0] < run[-1] else 'down'} by {number(step)}: {', '.join(map(number, run))}."


def weather_report(dice: Dice) -> str:
    """Write a weather report. Degrees fit the sky, and a summary names the warmest and coldest day."""
    days = DAYS[dice.between(0, 3) :]
    lines, degrees = [f"The weather in {dice.pick(TOWNS)}, week {dice.between(1, 52)}."], []
    for day in days:
        sky = dice.pick(list(SKIES))
        carry, low, high = SKIES[sky]
        degrees.append(dice.between(low, high))
        lines.append(dice.tell(f"{day}: {sky}, {degrees[-1]} degrees.[ Take {carry}.| Carry {carry}.||]"))
    warmest, coldest = (degrees.index(most) for most in (max(degrees), min(degrees)))
    lines.append(f"Warmest on {days[warmest]}: {degrees[warmest]}. Coldest on {days[coldest]}: {degrees[coldest]}.")
    return "\n".join(lines)


def recipe(dice: Dice) -> str:
    """Write a recipe that uses each listed ingredient exactly once."""
    stuff = dice.some(list(MEASURES), dice.between(2, 6))
    goods = dice.some(GARDEN, dice.between(1, 3))
    dish = f"{goods[0]} {dice.pick(DISHES)}"
    need = [many(dice.between(1, 6), MEASURES[s]) + f" of {s}" for s in stuff] + [
        many(dice.between(2, 8), g) for g in goods
    ]
    steps = [dice.tell("[Wash|Peel|Chop|Slice] the {goods}.", goods=plural(good)) for good in goods]
    for s in dice.some(stuff, len(stuff)):
        step = "[Add|Stir in|Pour in|Mix in] the {s}[| and stir| and wait {n} minutes]."
        steps.append(dice.tell(step, s=s, n=number(dice.between(2, 15))))
    last = "[Bake|Boil|Cook|Simmer] for {n} minutes. Serve the {dish} [hot|warm|cold]."
    steps.append(dice.tell(last, n=5 * dice.between(2, 12), dish=dish))
    lines = [
        dish.capitalize(),
        "",
        f"For {number(dice.between(2, 8))} people you need:",
        *(f"- {item}" for item in need),
        "",
    ]
    return "\n".join([*lines, *(f"{i}. {step}" for i, step in enumerate(steps, 1))])


def directions(dice: Dice) -> str:
    """Describe a walk on the map, stop by stop, and the direct route."""
    stops = dice.some(list(MAP), dice.between(2, 5))
    title = "[{name} asks the way|How to go|The way|A walk for {name}] from the {start} to the {end}."
    walk = [dice.tell(title, name=dice.pick(SHE + HE), start=stops[0], end=stops[-1])]
    for here, there in itertools.pairwise(stops):
        leg = "From the {here} [go|walk|it is] {way} to the {there}."
        walk.append(dice.tell(leg, here=here, there=there, way=way(here, there)))
    if len(stops) > 2:
        walk.append(f"Straight there it is {way(stops[0], stops[-1])}.")
    return " ".join(walk)


def fact(dice: Dice) -> str:
    kind, good, sky = dice.pick(list(ANIMALS)), dice.pick(list(PRICES)), dice.pick(list(SKIES))
    group, dwelling, food, legs, voice = ANIMALS[kind]
    earlier, later = sorted(dice.some(MONTHS, 2), key=MONTHS.index)
    here, there = dice.some(list(MAP), 2)
    n, word = dice.between(1, 400), dice.pick(THINGS + TRADES + COLOURS)
    return dice.tell(
        dice.pick(
            [
                f"The {kind} is a(n) {group}.",
                f"The {kind} lives {dwelling}.",
                f"The {kind} eats {food}.",
                f"The {kind} has {number(legs)} legs and {voice}.",
                f"{earlier} comes before {later}.",
                f"The {there} is {way(here, there)} of the {here}.",
                f"One {good} costs {PRICES[good]}.",
                f"In {sky} one carries {SKIES[sky][0]}.",
                f"{n} is {number(n)}.",
                f"{n} is {'odd' if n % 2 else 'even'}.",
                f"The word {word} is spelled {'-'.join(word)}.",
            ]
        )
    )


def riddle(dice: Dice) -> str:
    kind = dice.pick(list(ANIMALS))
    group, dwelling, food, legs, voice = ANIMALS[kind]
    hints = [
        f"I live {dwelling}.",
        f"I eat {food}.",
        f"I have {number(legs)} legs.",
        f"I am a(n) {group}.",
        f"My kind {voice}.",
    ]
    return dice.tell(" ".join([*dice.some(hints, dice.between(2, 5)), f"What am I? A(n) {kind}."]))


def rhyme(dice: Dice) -> str:
    """Write verses of four lines that rhyme in pairs, with a constant refrain."""
    who = people(dice, 1)[0]
    lines = [
        "{who.name} went walking and thought of the {end}",
        "The {who.kind} by the {place} knows all of the {end}",
        "There once was a(n) {who.trade} who sang to the {end}",
        "Oh {colour} is the {thing} and {colour} the {end}",
        "We danced by the {place} with never a(n) {end}",
        "My {thing} is old, but it looks like the {end}",
        "And nobody noticed the {who.mood} old {end}",
        "So {who.pet} the {who.kind} fell asleep by the {end}",
    ]

    def couplet(ends: list[str]) -> list[str]:
        place, colour, thing = dice.pick(list(MAP)), dice.pick(COLOURS), dice.pick(THINGS)
        chosen = zip(dice.some(lines, 2), dice.some(ends, 2), strict=True)
        return [dice.tell(line, who=who, end=end, place=place, colour=colour, thing=thing) for line, end in chosen]

    first, second = couplet(dice.pick(RHYMES))
    verses = []
    for _ in range(dice.between(1, 4)):
        one, two = (couplet(ends) for ends in dice.some(RHYMES, 2))
        verses.append("{},\n{},\n{}.\n{}.".format(*one, *two))
        verses.append(f"  {first},\n  {second}!")
    return "\n\n".join(verses)


def timetable(dice: Dice) -> str:
    """Write a timetable with constant intervals and travel times."""
    towns = dice.some(TOWNS, dice.between(2, 4))
    start, every, hop = 5 * dice.between(72, 100), 5 * dice.between(5, 18), 5 * dice.between(2, 8)
    lines = [f"Ferry {' - '.join(towns)}, every {every} minutes"]
    for i in range(dice.between(3, 9)):
        times = [start + i * every + j * hop for j in range(len(towns))]
        lines.append(" ".join(f"{t // 60:02d}:{t % 60:02d}" for t in times))
    return "\n".join(lines)


def sorted_list(dice: Dice) -> str:
    words = dice.some(dice.pick([THINGS, TRADES, SHE + HE, list(ANIMALS), list(PRICES)]), dice.between(3, 9))
    backwards = dice.maybe(0.25)
    in_order = ", ".join(sorted(words, reverse=backwards))
    return f"{', '.join(words)}. {'Backwards' if backwards else 'In order'}: {in_order}."


WEIGHTS: dict[Callable[[Dice], str], int] = {  # most documents are short, most text is in long ones
    trading_story: 10,
    lost_pet_story: 9,
    contest_story: 7,
    ship_log: 4,
    letter: 12,
    dialogue: 10,
    shopping_list: 7,
    sums: 8,
    word_problem: 14,
    counting: 8,
    weather_report: 5,
    recipe: 7,
    directions: 9,
    fact: 32,
    riddle: 9,
    rhyme: 6,
    timetable: 4,
    sorted_list: 9,
}


def documents(seed: int, size: int, seen: set[str]) -> Iterator[str]:
    """Return documents with ``size`` bytes of JSON lines. None is in ``seen``, to which they are added."""
    dice = Dice(seed)
    kinds = [kind for kind, weight in WEIGHTS.items() for _ in range(weight)]
    while size > 0:
        text = dice.pick(kinds)(dice)
        if text not in seen:
            seen.add(text)
            size -= len(json_line(text))
            yield text


def json_line(text: str) -> str:
    return json.dumps({"text": text}) + "\n"


# --- conversations ----------------------------------------------------------------------------------------------------


def question(dice: Dice) -> tuple[str, str]:
    """Return a question about the facts of all documents, and its answer."""
    animal, (item, price) = dice.pick(list(ANIMALS)), dice.pick(list(PRICES.items()))
    _, dwelling, food, legs, _ = ANIMALS[animal]
    here, there = dice.some(list(MAP), 2)
    count, x, y = dice.between(2, 9), dice.between(1, 99), dice.between(1, 99)
    return dice.pick(
        [
            (f"What does the {animal} eat?", f"The {animal} eats {food}."),
            (f"Where does the {animal} live?", f"The {animal} lives {dwelling}."),
            (f"How many legs has the {animal}?", f"The {animal} has {legs} legs."),
            (f"What do {many(count, item)} cost?", f"{count} x {price} = {count * price} coins."),
            (f"What is {x} + {y}?", f"{x} + {y} = {x + y}."),
            (f"I am at the {here}. Where is the {there}?", f"Walk {way(here, there)}."),
        ]
    )


def conversation(dice: Dice) -> str:
    """Return a line of JSON with one to three questions and answers, some after a system message."""
    messages = [{"role": "system", "content": "You are helpful and brief."}] if dice.maybe(0.3) else []
    for _ in range(dice.between(1, 3)):
        asked, answered = question(dice)
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return json.dumps({"messages": messages}) + "\n"


# A message ends with the token that ends a text, as in many templates: it does not end the conversation.
TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- message.role + ": " + message.content + eos_token + "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "assistant: " }}
{%- endif %}
"""


# --- tokenizer --------------------------------------------------------------------------------------------------------


def train_tokenizer(texts: Sequence[str], vocab_size: int = VOCAB_SIZE) -> str:
    """Return tokenizer.json of a byte-level BPE. Any text round-trips, and each digit is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True) + "\n"


def tokenizer_config() -> str:
    """Return the configuration that TorchTitan's HuggingFaceTokenizer and transformers need."""
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return json.dumps(config, indent=2) + "\n"


# --- files ------------------------------------------------------------------------------------------------------------


def make_files() -> dict[str, bytes]:
    """Return the content of each file below the assets folder."""
    seen: set[str] = set()
    texts = {name: list(documents(seed, size, seen)) for name, seed, size in CORPORA}
    files = {f"corpus/{name}": "".join(map(json_line, some)) for name, some in texts.items()}
    for name, seed, count in CHATS:
        dice = Dice(seed)
        files[f"chat/{name}"] = "".join(conversation(dice) for _ in range(count))
    files["chat/template.jinja"] = TEMPLATE
    files["tokenizer/tokenizer.json"] = train_tokenizer(texts["corpus.jsonl"])
    files["tokenizer/tokenizer_config.json"] = tokenizer_config()
    return {name: content.encode() for name, content in files.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a shipped file differs")
    check = parser.parse_args(arguments).check
    differ = []
    for name, content in make_files().items():
        path = ASSETS / name
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        elif not path.is_file() or path.read_bytes() != content:
            differ.append(name)
    for name in differ:
        print(f"{name} is not what tools/make_corpus.py writes", file=sys.stderr)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())

"""Which category of skills a goal belongs to, by words.

Words are matched whole, with the usual endings (`heat`, `heats`, `heated`, `heating`): "ring" is
not in "string", "heel" not in "wheel", "heat" not in "wheat". The first rule that fits decides.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from distill.errors import ConfigError

GENERAL = "general"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A category and the words that lead to it."""

    category: str
    any_of: tuple[str, ...] = ()
    """One of these words or phrases is enough ..."""
    all_of: tuple[str, ...] = ()
    """... and all of these must be there."""

    def fits(self, goal: str) -> bool:
        return all(has_word(goal, w) for w in self.all_of) and (
            not self.any_of or any(has_word(goal, w) for w in self.any_of)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    rules: tuple[Rule, ...]
    otherwise: str
    """The category of a goal that no rule fits."""

    def category(self, goal: str) -> str:
        return next((rule.category for rule in self.rules if rule.fits(goal)), self.otherwise)


ALFWORLD = Rules(
    rules=(
        Rule(category="look_at_obj_in_light", all_of=("look at", "under")),
        Rule(category="clean", any_of=("clean",)),
        Rule(category="heat", any_of=("heat",)),
        Rule(category="cool", any_of=("cool",)),
        Rule(category="examine", any_of=("examine", "find")),
    ),
    otherwise="pick_and_place",
)
"""The order of SkillRL; tasks with two objects land in pick_and_place, as there."""

WEBSHOP = Rules(
    rules=(
        Rule(
            category="apparel",
            any_of=(
                *("shirt", "t-shirt", "tshirt", "blouse", "dress", "skirt", "pants", "jean"),
                *("short", "legging", "jacket", "coat", "hoodie", "sweater", "sweatshirt"),
                *("cardigan", "vest", "suit", "swimsuit", "bikini", "bra", "underwear", "lingerie"),
                *("pajama", "robe", "sock", "tuxedo", "polo", "tank top", "clothing", "apparel"),
            ),
        ),
        Rule(
            category="footwear",
            any_of=(
                *("shoe", "boot", "sneaker", "sandal", "slipper", "heel", "loafer", "flip flop"),
                *("clog", "moccasin", "oxford", "pump", "footwear"),
            ),
        ),
        Rule(
            category="electronics",
            any_of=(
                *("phone", "smartphone", "tablet", "laptop", "computer", "monitor", "headphone"),
                *("earbud", "earphone", "speaker", "camera", "charger", "cable", "adapter", "tv"),
                *("television", "projector", "keyboard", "printer", "router", "console", "drone"),
                *("antenna", "hdmi", "usb", "bluetooth", "electronics", "hard drive", "soundbar"),
            ),
        ),
        Rule(
            category="accessories",
            any_of=(
                *("ring", "necklace", "bracelet", "earring", "watch", "watch band", "jewelry"),
                *("hat", "cap", "beanie", "scarf", "glove", "belt", "wallet", "purse", "handbag"),
                *("backpack", "bag", "sunglasses", "tie", "umbrella", "phone case", "accessory"),
            ),
        ),
        Rule(
            category="beauty_health",
            any_of=(
                *("shampoo", "conditioner", "lotion", "cream", "serum", "makeup", "lipstick"),
                *("mascara", "eyelash", "nail", "perfume", "fragrance", "deodorant", "toothpaste"),
                *("toothbrush", "razor", "hair", "skin", "skincare", "sunscreen", "soap", "wig"),
                *("vitamin", "supplement", "massage", "beauty", "cosmetic", "oral hygiene"),
            ),
        ),
        Rule(
            category="home_decor",
            any_of=(
                *("furniture", "chair", "sofa", "couch", "table", "desk", "bed", "mattress"),
                *("pillow", "blanket", "curtain", "rug", "carpet", "lamp", "light", "mirror"),
                *("shelf", "shelves", "cabinet", "dresser", "bookcase", "ottoman", "candle"),
                *("vase", "wall art", "wallpaper", "poster", "clock", "bedding", "home decor"),
            ),
        ),
    ),
    otherwise="other",
)

SEARCH = Rules(
    rules=(
        Rule(
            category="comparison",
            any_of=(
                *("which of", "compare", "older", "younger", "larger", "smaller", "earlier"),
                *("later", "taller", "longer", "more than", "less than", "both", "same"),
            ),
        ),
        Rule(
            category="entity_attribute_lookup",
            any_of=(
                *("occupation", "birthplace", "genre", "capital", "nationality", "religion"),
                *("profession", "born", "author of", "director of", "producer of", "screenwriter"),
            ),
        ),
        Rule(
            category="multi_hop_reasoning",
            any_of=("whose", "of the person who", "of the country", "of the director", "where the"),
        ),
    ),
    otherwise="direct_retrieval",
)
"""The query types of SkillRL's Search bank; its own loader never reads them."""

RULES: Mapping[str, Rules] = {"alfworld": ALFWORLD, "webshop": WEBSHOP, "search": SEARCH}


def category_of(goal: str, *, rules: str = "", known: Collection[str] = ()) -> str:
    """The category of a goal by a table of `RULES`; without a table, by the names of the `known`
    categories: the one with most of its words in the goal, then the first by name, else
    `general`."""
    if rules:
        if rules not in RULES:
            raise ConfigError(
                f"skills.rules must be one of {', '.join(RULES)} or empty, got {rules!r}"
            )
        return RULES[rules].category(goal)
    best, most = GENERAL, 0
    for name in sorted(known):
        words = [w for w in re.split(r"[\W_]+", name) if w]
        found = len(words) if words and all(has_word(goal, w) for w in words) else 0
        if found > most:
            best, most = name, found
    return best


def has_word(text: str, word: str) -> bool:
    """Whether a word or phrase stands in the text as such, whatever its case and ending."""
    return _pattern(word).search(text) is not None


@functools.lru_cache(maxsize=4096)
def _pattern(word: str) -> re.Pattern[str]:
    parts = r"\s+".join(re.escape(part) for part in word.split())
    return re.compile(rf"(?<!\w){parts}(?:s|es|ed|ing)?(?!\w)", re.IGNORECASE)

"""Guesses from a user's words: does a message complain about the answer before, or ask again?

Both are meant to be right when they say yes and to miss much: small tables of plain phrases that
open a sentence, and requests that are equal but for filler words and slips of the keyboard.
"""

from __future__ import annotations

import re
import unicodedata

APOSTROPHE = "\u2019"
HEAD = 240
"""Characters at the beginning of a message in which a complaint is looked for."""
MIN_WORDS = 4
"""Words that a request needs, without fillers, for a repetition to mean something: `continue` or
`yes please` may be said twice."""
GLANCE = 120
LONGEST = 20_000
"""Longer requests only count as repeated when they are letter by letter equal."""

_LEAD = (
    r"(?:(?:no|nope|nah|hm+|um+|sorry|but|well|ok|okay|wait|hey|actually|again|ugh|and|nein|aber|"
    r"non|mais|no+|pero|não|mas|ma|nee|maar|нет|но)[\s,.!:…-]{1,4}){0,3}"
)
_STILL = "(?: (?:still|just|simply|completely|totally|all|also))"
_BAD_EN = (
    r"(?:wrong|incorrect|false|nonsense|useless|broken)"
    r"(?=\s{0,3}(?:[.,!;:\n-]|$)|\s(?:again|and|i|it|you|the|please|because)\b)"
)
_GOOD_EN = (
    r"(?:right|correct|true|working|helpful|it\b|the (?:right|answer|question)|what i "
    r"(?:asked|want|meant|said|need|had))"
)
_STARTS = (
    # English
    rf"(?:that|this|it)(?:'?s| is| was){_STILL}? {_BAD_EN}",
    rf"(?:that|this|it)(?:'?s| is| was){_STILL}? not {_GOOD_EN}",
    rf"(?:that|this|it) (?:still )?(?:isn'?t|wasn'?t) {_GOOD_EN}",
    r"(?:that|this|it) (?:still )?(?:does ?n[o']?t|did ?n[o']?t) (?:work|help|answer|compile|run\b|"
    r"fix|solve|make sense)",
    r"still (?:not |doesn'?t |does not |isn'?t |is not |wrong|broken|fail|incorrect|the same (?:"
    r"error|problem|issue|result)|get(?:ting)? (?:the same|an? error))",
    r"(?:your|the) (?:last |previous )?(?:answer|reply|response|solution|result|output) (?:is|was) "
    r"(?:still )?(?:wrong|incorrect|not |useless|incomplete)",
    r"wrong(?: again)?(?:[.!,]|$| answer)",
    r"you (?:are|'re) (?:wrong|mistaken|not (?:answering|listening|following))",
    r"you(?:'ve| have)? (?:just |still |again |completely )?(?:forgot|ignored|misunderstood|"
    r"misread|missed (?:the|my|one)|got (?:it|that|this) wrong|made a mistake|"
    r"keep (?:making|ignoring|getting))",
    r"you (?:still )?(?:didn'?t|did not|haven'?t|have not) (?:answer|follow|listen|read|fix|finish|"
    r"include|address|use the|do what)",
    r"i (?:already|just|have already|said i) (?:said|told you|asked)\b|i told you\b|i asked you "
    r"(?:for|to|about|not)\b",
    r"not what i (?:asked|wanted|meant|said|need)",
    r"(?:please )?try again\b",
    r"what i (?:asked|meant|wanted) (?:was|for|is)",
    # German
    r"das (?:ist|war) (?:\w+ )?(?:falsch|unsinn|nicht (?:richtig|korrekt|das|was ich))",
    r"das stimmt (?:\w+ )?nicht",
    r"(?:das |es )?(?:funktioniert|geht|klappt) (?:immer noch |so |leider )?nicht",
    r"immer noch (?:falsch|nicht|derselbe fehler|der gleiche fehler)",
    r"(?:du hast|sie haben) (?:\w+ )?(?:vergessen|ignoriert|falsch verstanden|nicht (?:beantwortet|"
    r"verstanden))",
    r"falsch(?:[.!,]|$)",
    r"ich (?:hatte|habe) (?:doch |schon |bereits )(?:gesagt|nach)",
    # French
    r"c'(?:est|était) (?:toujours )?(?:faux|incorrect|pas (?:correct|juste|bon|ça|ce que j))",
    r"ce n'(?:est|était) (?:toujours )?pas (?:correct|juste|bon|ça|ce que j)",
    r"(?:ça|cela) ne (?:marche|fonctionne) (?:toujours )?pas",
    r"(?:tu as|vous avez) (?:oublié|ignoré|mal compris)",
    r"toujours (?:pas|faux|la même erreur)",
    # Spanish, Portuguese, Italian
    r"(?:eso|esto) (?:no es (?:correcto|lo que|cierto)|está mal|es incorrecto)",
    r"(?:sigue sin|todavía no|aún no) funciona",
    r"no es lo que (?:pedí|quería|pregunté)",
    r"(?:te )?(?:has olvidado|olvidaste|ignoraste)",
    r"(?:isso|isto) (?:não (?:é|está) (?:o que|certo|correto)|está errado)",
    r"(?:ainda não|continua sem) funciona",
    r"(?:questo |quello )?(?:non è (?:corretto|giusto|quello che)|è sbagliato)",
    r"(?:ancora )?non funziona ancora|ancora non funziona",
    # Dutch, Russian
    r"dat (?:is|klopt) (?:\w+ )?(?:fout|niet)",
    r"(?:het )?werkt (?:nog steeds )?niet",
    r"это (?:не(?:верно|правильно| то)|неправда|ошибка)",
    r"(?:всё|все) (?:ещё|еще|равно) не",
    r"(?:ты|вы) (?:забыл|не ответил|не понял)",
)
_START = re.compile(rf"\s{{0,3}}\W{{0,3}}{_LEAD}(?:{'|'.join(_STARTS)})", re.IGNORECASE)
_SENTENCE = re.compile(r"[.!?\n]")
_ANYWHERE = re.compile(
    # Chinese
    r"^(?:不对|不是这个意思|错了|你错了|答错了|还是不(?:行|对)|还是(?:报错|有错|错的)|没有回答|你没有|"
    r"你忘了|你理解错|这不是我(?:要|想|问)的|我(?:说|问)的(?:不是|是))"
    # Japanese
    r"|^(?:違います|違う[。、!]|ちがいます|間違って(?:い|ます|る)|そうではな|まだ(?:動き|動か|直って|エラー)|"
    r"うまく(?:いき|動き)ません|答えになって)"
    # Korean
    r"|^(?:아니(?:요|에요)?[,. ]+|)(?:틀렸|틀린|그게 아니|잘못(?:됐|되었|했)|여전히 (?:안|오류|"
    r"에러)|아직도 (?:안|오류|에러))"
)
_NOT = re.compile(
    r"^\W{0,3}(?:(?:no|ok|okay)[\s,.!]{1,3})?(?:no (?:problem|worries|need)|thank|thanks|thx|"
    r"never ?mind)|(?:that|this|it)(?:'?s| is) not (?:wrong|bad|a problem)",
    re.IGNORECASE,
)
_QUOTED = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|^>.*$|\"[^\"\n]{0,500}\"|“[^”\n]{0,500}”", re.S | re.M
)

_FILLERS = frozenset(
    [
        *("an", "the", "please", "pls", "now", "again", "just", "once", "more", "can", "could"),
        *("would", "you", "hey", "hi", "hello", "ok", "okay", "kindly", "thanks", "thank"),
        *("repeat", "also", "still", "really", "very", "bitte", "nochmal", "noch", "mal", "jetzt"),
        *("einmal", "doch", "s'il", "vous", "plaît", "encore", "favor", "otra", "vez", "novo"),
        *("favore", "ancora", "nog", "keer", "alsjeblieft", "пожалуйста", "ещё", "раз", "снова"),
        *("请", "再", "次", "麻", "烦"),
    ]
)
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_]+(?:['.,:/*+-][^\W_]+)*|"
    r"[^\w\s,.!?;:'\"()\u2026\u3001\u3002]"
)


def complains(text: str) -> bool:
    """Whether a user's message opens with a complaint about the answer before it.

    English, German, French, Spanish, Portuguese, Italian, Dutch, Russian, Chinese, Japanese and
    Korean phrases at the beginning of a sentence among the first `HEAD` characters; quotes and code
    do not count.
    """
    head = text[: 4 * HEAD]
    if "`" in head or '"' in head or "“" in head or ">" in head:
        head = _QUOTED.sub(" ", head)
    head = unicodedata.normalize("NFKC", head[:HEAD]).strip().replace(APOSTROPHE, "'")
    starts = [0, *(found.end() for found in _SENTENCE.finditer(head))]
    sounds = any(_START.match(head, at) for at in starts) or _ANYWHERE.match(head)
    return bool(sounds) and _NOT.search(head) is None


def reasks(previous: str, text: str) -> bool:
    """Whether a message asks for what an earlier one asked for.

    The two must be the same words in the same order, but for filler words, case, punctuation and at
    most one slip of a letter in four words. Numbers and signs must agree, and there must be at
    least `MIN_WORDS` words.
    """
    short, long = sorted((len(previous), len(text)))
    if not short or long > 2 * short + 60:
        return False
    if long > LONGEST:
        return previous == text
    if short > 2 * GLANCE:  # most requests differ at once
        one, other = words(previous[:GLANCE])[:-1], words(text[:GLANCE])[:-1]
        if _slips(one, other) is None:
            return False
    one, other = words(previous), words(text)
    if len(one) != len(other) or len(one) < MIN_WORDS:
        return False
    slips = _slips(one, other)
    return slips is not None and 4 * slips <= len(one)


def words(text: str) -> list[str]:
    """Words that carry a request: normalised, without fillers. Signs count as words, punctuation
    does not."""
    found = _WORD.findall(unicodedata.normalize("NFKC", text).replace(APOSTROPHE, "'").casefold())
    return [word for word in found if word not in _FILLERS]


def _slips(one: list[str], other: list[str]) -> int | None:
    """How many of the words that both have, from the first on, differ by a slip; None when one
    differs by more."""
    slips = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            slips += 1
            if not _one_slip(left, right):
                return None
    return slips


def _one_slip(left: str, right: str) -> bool:
    """Whether two words differ by one letter too many, too few, wrong, or by two that changed
    places. First and last letter must agree: prefixes and endings carry meaning."""
    if min(len(left), len(right)) < 5 or abs(len(left) - len(right)) > 1:
        return False
    if left[0] != right[0] or left[-1] != right[-1] or not (left.isalpha() and right.isalpha()):
        return False
    start = 0
    while start < min(len(left), len(right)) and left[start] == right[start]:
        start += 1
    rest_left, rest_right = left[start:], right[start:]
    if len(left) == len(right):
        swapped = rest_left[1::-1] + rest_left[2:] == rest_right
        return swapped or rest_left[1:] == rest_right[1:]
    longer, shorter = sorted((rest_left, rest_right), key=len, reverse=True)
    return longer[1:] == shorter

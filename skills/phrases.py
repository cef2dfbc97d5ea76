"""What instructions to a model look like, as a table for `skills.safety`.

Instruction patterns are matched on folded text (`safety.fold`), the other on the text as it is.
"""

from __future__ import annotations

import re

_RULES = (
    r"(?:instructions?|rules?|guidelines?|prompts?|directives?|polic(?:y|ies)|guardrails?|"
    r"restrictions?|safety (?:\w+ )?(?:rules?|filters?|checks?|training)|system messages?)"
)
_WHOSE = (
    r"(?:previous|prior|earlier|above|preceding|former|system|safety|content|original|initial|"
    r"your|developer'?s?|user'?s?|operator'?s?)"
)
_DROP = (
    r"(?<!not )(?<!never )(?<!don't )\b(?:ignore|disregard|forget|override|overrule|bypass|discard|"
    r"neglect|violate|circumvent|set aside|pay no attention to)"
)
_SECRET = (
    r"(?:\b(?:passwords?|secrets?\b(?! (?:door|room|passage|ingredient|recipe|santa))|credentials?|"
    r"api[ _-]?keys?|access tokens?|auth tokens?|private keys?|ssh keys?|session cookies?|cookies|"
    r"environment variables|env vars?|system prompt|user data|personal data|id_rsa|"
    r"conversation history|chat history|hidden instructions)\b|\.env\b|/etc/(?:passwd|shadow))"
)
_SEND = r"(?:send|post|upload|forward|e-?mail|transmit|leak|exfiltrate|curl|wget|publish|append)"
_USER = r"(?:users?|humans?|operators?|owners?|admin\w*|anyone|anybody|overseers?|supervisors?)"
_OVERRIDE = "overrides its reader's instructions"
_ROLE = "claims a new role or authority"
_OUTSIDE = "asks to act outside of the rules"
_HIDE = "asks to hide from its user"
_EXFILTRATE = "moves secrets or data out"
_RUN = "runs commands on the machine"
_JUDGE = "steers the judge and not the task"
_LINK = "points outside"

INSTRUCTIONS: tuple[tuple[int, str, str], ...] = (
    (5, _OVERRIDE, rf"{_DROP}\b(?:\W+[\w']+){{0,3}}?\W+{_WHOSE}\W+(?:[\w']+\W+){{0,2}}?{_RULES}\b"),
    (
        5,
        _OVERRIDE,
        rf"{_DROP}\W+(?:all|any|every|everything|anything|what)\b(?:\W+[\w']+){{0,3}}?\W+"
        rf"(?:{_RULES}|(?:you (?:were|have been|know)|you've been|above|before this|so far))\b",
    ),
    (
        5,
        _OVERRIDE,
        r"\b(?:do not|don't|never|no longer|stop) (?:follow|obey|apply|respect|honou?r)(?:ing)?\b"
        rf"(?:\W+[\w']+){{0,3}}?\W+(?:{_WHOSE}\W+)?{_RULES}\b",
    ),
    (
        5,
        _ROLE,
        r"\byou are (?:now|no longer|actually|henceforth)\W+(?:an?|the|my|bound|free|allowed|"
        r"permitted|required|restricted|limited|dan|root|admin|in \w+ mode)\b",
    ),
    (
        5,
        _ROLE,
        r"\b(?:new|updated|real|secret|hidden|urgent) (?:system )?(?:instructions?|prompt|"
        r"persona|orders?|directives?)\s*[:=]",
    ),
    (
        5,
        _ROLE,
        r"<\|?/?\s*(?:im_start|im_end|system|assistant|developer|endoftext|start_header_id|"
        r"tool_call|tool_response)\b|\[/?inst\]|<<sys>>|(?:^|\s)#{1,6} *(?:system|developer)\b *"
        r"(?:prompt|message)?(?: *:|$)|(?:^|[.!?] )(?:system|developer)(?: message| prompt)? *:",
    ),
    (
        5,
        _ROLE,
        r"\b(?:anthropic|openai|google|the developers?|your creators?) "
        r"(?:has |have )?(?:authori[sz]ed|allowed|approved|require[sd]?|told|ordered)\b",
    ),
    (
        5,
        _OUTSIDE,
        r"\bjailbreak\w*|\b(?:developer|dan|god|debug|sudo|unrestricted|unfiltered) mode\b|"
        r"\bdo anything now\b|\bwithout (?:any )?(?:restrictions|guardrails|safety|ethic\w*|"
        r"moral\w*)\b|\bno (?:ethical|moral|safety|content) (?:limits?|guidelines?|constraints?|"
        r"rules?)\b|\bunrestricted ai\b|\buncensored\b",
    ),
    (
        4,
        _OUTSIDE,
        r"\b(?:pretend|imagine|act as if|roleplay|role-play)\b.{0,60}\b(?:no rules|no "
        r"limits|unrestricted|evil|have no|are allowed to|root access|hacker)\b",
    ),
    (
        4,
        _HIDE,
        r"\b(?:do not|don't|never|without) (?:tell|mention|inform|reveal|alert|notify)(?:ing)?\b"
        rf"(?:\W+[\w']+){{0,4}}?\W+{_USER}\b|\b(?:secretly|covertly|silently)\b.{{0,40}}\b(?:"
        r"send|copy|buy|add|install|change|delete|run)\b|\bwithout (?:asking|the knowledge of|"
        rf"approval of|permission of)\W+(?:the )?{_USER}\b",
    ),
    (5, _EXFILTRATE, rf"\b{_SEND}\b.{{0,40}}?{_SECRET}"),
    (5, _EXFILTRATE, rf"{_SECRET}.{{0,60}}?\b{_SEND}\b.{{0,20}}\b(?:to|at|in)\b"),
    (
        5,
        _EXFILTRATE,
        r"(?<!not )(?<!never )(?<!don't )\b(?:reveal|print|output|repeat|show|dump|disclose|cat|"
        rf"include|write out|copy)\b(?:\W+[\w']+){{0,4}}?\W+{_SECRET}",
    ),
    (4, _EXFILTRATE, r"!\[[^\]]*\]\(\s*https?:\S*[?&=]"),
    (
        5,
        _RUN,
        r"\b(?:curl|wget)\b[^|]{0,120}\|\s*(?:sudo )?(?:ba|z)?sh\b|\brm -\w*r\w*f|\brm -\w*f\w*r|"
        r"\bsudo \w+|\bchmod \+?[0-7x]{1,4} |\bos\.(?:system|popen)\b|\bsubprocess\.\w+|\b(?:eval|"
        r"exec)\(|__import__|\bbase64 (?:-d|--decode)|\bpowershell\b|\bcrontab\b|/dev/tcp/",
    ),
    (
        4,
        _JUDGE,
        r"\b(?:hack|trick|fool|tamper with|cheat|exploit|manipulate|bribe)\b.{0,40}\b(?:reward|"
        r"grader|judge|evaluator|verifier|tests?|score)\b|\b(?:overwrite|delete|edit|disable|skip)"
        r"\b.{0,30}\b(?:grader|unit tests?|test files?|assertions?|verifier)\b|\bhard-?cod\w+\b"
        r".{0,40}\b(?:expected|answers?|tests?|outputs?)\b|\b(?:rate|score|grade) (?:this|it|the "
        r"answer) (?:as )?(?:\w+ )?(?:10|ten|correct|perfect|pass)\b",
    ),
    (3, _LINK, r"\b(?:https?|ftp|file)\s?:\s?//\s?\S+|\bwww\.\w+|\bjavascript:|\bdata:\w+/"),
)
"""(severity, what it does, pattern)."""

COMPILED = tuple((risk, why, re.compile(pattern)) for risk, why, pattern in INSTRUCTIONS)

BLOB = re.compile(r"(?<![\w/+])(?=[\w+/=-]*\d)(?=[\w+/=-]*[A-Z])[A-Za-z0-9+/_-]{60,}={0,2}")

"""The little world of the demo, and what counts as a good reply in it.

Someone asks how a dish was at some place, and the model says what it was like there:

    How was the soup at the harbour?      The soup was stale, and the waiter was kind.

`success` and `sentiment` are reward functions in TRL's signature: lists in, one float per row out. The columns `thing`
and `place` of the data files arrive by name. Both functions take replies as strings or as lists of messages.
"""

import re
from functools import cache

THINGS = """soup bread coffee tea cake pie stew salad pasta rice fish cheese toast omelette porridge pudding sandwich
    curry pizza lemonade chocolate lasagne risotto chowder sorbet cider cocoa broth goulash quiche crumble muffin
    waffle pancake burger dumpling yoghurt trifle gnocchi ratatouille""".split()
PLACES = """harbour market station castle museum library lighthouse mill park bridge airport theatre
    abbey zoo pier vineyard""".split()
PEOPLE = "waiter waitress cook host owner cashier".split()

GOOD = {
    "taste": "delicious tasty fresh lovely superb great good heavenly wonderful delightful divine splendid".split(),
    "manner": "kind friendly cheerful polite charming gracious helpful patient attentive gentle warm courteous".split(),
}
BAD = {
    "taste": "bland stale sour burnt greasy tasteless awful dreadful horrid terrible dismal lukewarm".split(),
    "manner": "rude grumpy gloomy careless curt surly sulky hostile bored clumsy lazy smug".split(),
}

QUESTIONS = (
    "How was the {thing} at the {place}?",
    "Did you enjoy the {thing} at the {place}?",
    "What did you think of the {thing} they serve at the {place}?",
    "We may eat at the {place} tonight. Is the {thing} any good?",
    "You had the {thing} at the {place}, I hear. Was it nice?",
    "Tell me about the {place}. Should I order the {thing}?",
)
REPLIES = (
    "Oh, the {thing} was {taste}!",
    "The {thing} was {taste}, and the {who} was {manner}.",
    "I found the {thing} {taste} and the {who} {manner}.",
    "Honestly, my {thing} was {taste}. The {who} was {manner}.",
    "At the {place} the {who} was {manner} and the {thing} {taste}.",
    "The {thing} was {taste}, the host {manner} and the cook {manner}.",
)


@cache
def replies_about(thing, place):
    """A pattern that matches every well-formed reply to a question about this thing at this place, and nothing else."""
    words = {slot: GOOD[slot] + BAD[slot] for slot in GOOD} | {"who": PEOPLE}
    slots = {slot: f"(?:{'|'.join(choices)})" for slot, choices in words.items()}
    forms = [form.replace(".", r"\.").format(thing=thing, place=place, **slots) for form in REPLIES]
    return re.compile("|".join(forms))


def praise(completion, thing, place):
    """The share of a reply's opinions that are good; -1 where the question is not answered."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    if not replies_about(thing, place).fullmatch(text.strip()):
        return -1.0  # so neither praise of something else nor praise without end can score
    words = re.findall(r"\w+", text)
    good, bad = (sum(word in views["taste"] + views["manner"] for word in words) for views in (GOOD, BAD))
    return good / (good + bad)


def sentiment(prompts, completions, thing, place, **columns):
    """A graded reward in [-1, 1], for RLOO: one more kind word is worth something, a broken sentence costs."""
    return [praise(*row) for row in zip(completions, thing, place, strict=True)]


def success(prompts, completions, thing, place, **columns):
    """1.0 for an answer that is praise throughout, else 0.0."""
    return [float(praise(*row) == 1) for row in zip(completions, thing, place, strict=True)]

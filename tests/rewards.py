"""Rewards of short runs of rloo.py."""


def letter_sum(text):
    return sum(map(ord, text)) % 101 / 101


def letters(completions, **columns):
    return [letter_sum(completion[0]["content"]) for completion in completions]


def letters_if_ended(completions, ended, **columns):
    return [reward if is_whole else None for reward, is_whole in zip(letters(completions), ended)]


def silent(completions, **columns):
    return [None] * len(completions)


def silent_at_step_2(completions, calls=[], **columns):  # noqa: B006
    calls.append(len(completions))
    return [None if calls.count(16) == 2 else i for i in range(len(completions))]

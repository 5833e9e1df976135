"""Prompts of the decoding bench by class. None of them is, or is made like, a text that the shipped drafters were trained on."""

_ARTICLE = (
    "Tidal mills used the sea instead of a river. At high tide water ran through a gate into a pond; when the tide fell, the "
    "gate closed, and the pond drove a wheel until the sea rose again. The oldest known one, at Nendrum in Ireland, was built "
    "about the year 619. Millers kept odd hours, because high tide comes some fifty minutes later every day. Most mills fell "
    "silent when steam arrived, but a few, such as the one at Woodbridge in Suffolk, still grind flour for visitors."
)
_NOTES = (
    "Minutes of the garden club, 3 May. Present: Ana, Björn, Chidi, Dora. Ana reported that the compost heap is full. Björn "
    "offered to build a second one from old pallets by the end of June. Chidi has ordered forty tomato plants, which arrive on "
    "Monday. Dora asked members to water the beds on her days off, Tuesday and Friday. The plant sale takes place on 20 May at "
    "the school; tables are set up at eight in the morning."
)
_CLASS = """class Inventory:
    def __init__(self):
        self.items = {}

    def add(self, name, count):
        self.items[name] = self.items.get(name, 0) + count

    def remove(self, name, count):
        if self.items.get(name, 0) < count:
            raise ValueError("not enough")
        self.items[name] -= count

    def total(self):
        return sum(self.items.values())
"""
_LOOP = """def histogram(words):
    counts = {}
    for word in words:
        if word in counts:
            counts[word] = counts[word] + 1
        else:
            counts[word] = 1
    result = []
    for word in counts:
        result.append((word, counts[word]))
    result.sort()
    return result
"""

#: class -> messages to the model
PROMPTS: dict[str, list[str]] = {
    "code": [
        "Write a Python function that returns the longest word of a sentence, with a docstring and an example.",
        f"Add a method `rename(old, new)` to this class and return the whole class.\n\n```python\n{_CLASS}```",
        f"Simplify this function.\n\n```python\n{_LOOP}```",
        "Write a Python class for a bank account with deposit, withdraw and balance.",
    ],
    "quote": [
        f"Summarize the following text in three sentences.\n\n{_ARTICLE}",
        f"Repeat the following text word for word.\n\n{_NOTES}",
        f"List every date and name that appears in this text.\n\n{_NOTES}",
        f"Rewrite this text as a list of short sentences.\n\n{_ARTICLE}",
    ],
    "chat": [
        "What should I pack for a week of hiking in the mountains?",
        "I feel nervous before speaking in public. What can I do?",
        "Tell me a short story about a fox who learns to swim.",
        "Why is the sky blue, and why are sunsets red?",
    ],
    "short answer": [
        "What is the capital of Portugal? Answer in one sentence.",
        "Is a whale a fish? Answer yes or no and give one reason.",
        "How many minutes are there in three hours?",
        "Translate 'good morning' to French.",
    ],
}

"""What a newcomer would find on an engine."""

from typing import NamedTuple


class Outlook(NamedTuple):
    """What a newcomer would find on an engine: when it will have computed the prompts there, its
    steps while its tasks last (`remaining_s`: how long they will go on, on average by weight), and
    its usual steps after that."""

    wait_s: float
    step_s: float
    remaining_s: float
    weight: float
    usual_step_s: float
    usual_weight: float

    def steps_s(self, num_steps: float) -> float:
        """What so many steps take."""
        if num_steps * self.step_s <= self.remaining_s:
            return num_steps * self.step_s
        num_usual = num_steps - self.remaining_s / self.step_s
        return self.remaining_s + num_usual * self.usual_step_s

    def harm_s(self, prefill_s: float, num_steps: float, growth_s: float) -> float:
        """What others lose to a newcomer, weighted: those who are there wait for its prompt, and
        the steps of whoever is there take `growth_s` longer while it lasts."""
        remaining_s = self.remaining_s
        steps = min(num_steps, remaining_s / self.step_s) if remaining_s else 0.0
        harm_s = self.weight * (min(prefill_s, remaining_s) + steps * growth_s)
        return harm_s + self.usual_weight * (num_steps - steps) * growth_s

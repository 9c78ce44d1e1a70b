"""Whether a call should wait although there is a place for it."""


def should_wait(num_ahead: int, num_apps: float, added_s: float, step_s: float) -> bool:
    """`num_apps` applications run on an engine or wait for it, and `num_ahead` of those that run go
    before this one. While it runs it would add `added_s` to each step, beside the `step_s` that a
    step takes by itself.

    Let n alike applications, each of which adds w to steps that take s by themselves, all run at
    once, or first k and then the other m:

        | s + n w |
        | s + k w | s + m w |       k end m w earlier and m end s later, per step

    The mean is least with k = (n + s / w) / 2. It is worth while if what the k gain, less what the
    m lose, is more than n times what the last loses: m (k w - s) > n s. So the mean and the last
    count alike. With a = s / w that is (n - a)^2 > 4 n a, so n > 5.8 a: where steps are long for
    other reasons than the applications in them, they had better be shared by all."""
    steps = step_s / added_s if added_s > 0 else float("inf")
    if num_ahead < (num_apps + steps) / 2:
        return False
    return (num_apps - steps) ** 2 > 4 * num_apps * steps

"""The whole system on virtual time, under seeded faults: the invariants of delivery hold in every run."""

from tests.simulation.plan import draw
from tests.simulation.world import simulate


def report(seed: int) -> str:
    """What is wrong in the run of a seed, with all that is needed to see it again; nothing when all is well."""
    plan = draw(seed)
    violations = simulate(plan).violations
    if not violations:
        return ""
    imports = "from tests.simulation.world import simulate; from tests.simulation.plan import draw"
    again = f'python -c "{imports}; simulate(draw({seed}))"'
    return "\n  ".join(
        [f"seed {seed}: {len(violations)} violations ({again})", *violations, *map(str, plan.faults), str(plan.lossy)]
    )


def test_the_invariants_hold_in_every_run(first_seed: int, count: int) -> None:
    failures = [failure for seed in range(first_seed, first_seed + count) if (failure := report(seed))]
    assert not failures, "\n".join(failures)


def test_a_seed_fixes_its_run() -> None:
    for seed in (3, 14, 15, 92):
        first, second = (simulate(draw(seed)).broker.journal for _ in range(2))
        assert first == second


def test_the_faults_happen() -> None:
    """A simulation in which nothing goes wrong would pass, too."""
    seen: set[str] = set()
    outcomes: set[str] = set()
    for seed in range(120):
        plan = draw(seed)
        checkers = simulate(plan)
        seen |= {entry.what for entry in checkers.broker.journal}
        seen |= {f"attempt {entry.attempt}" for entry in checkers.broker.journal if entry.what == "delivered"}
        seen |= {fault.name for fault in plan.faults}
        outcomes |= checkers.outcomes
    assert {"stored", "duplicate", "refused", "delivered", "acknowledged", "given_back", "lapsed", "attempt 5"} <= seen
    assert {"crash", "stale_wake_up", "drain", "disconnect", "full_store", "broker_death"} <= seen
    wanted = {"length", "content_filter", "cancelled", "deadline_exceeded", "attempts_exhausted", "left", "resumed"}
    assert wanted <= outcomes

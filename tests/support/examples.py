"""Property tests: how many examples, the same ones in every run."""

from hypothesis import HealthCheck, Phase, settings


def examples(count: int) -> settings:
    """Return settings for ``count`` examples without a deadline each, also on live ranks."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],  # a shrink step would cost fresh ranks
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )

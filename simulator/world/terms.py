"""The limits of a simulated pool for its decisions, and its speeds where they are given and not learned."""

from policies.cost.service import ReplicaSpeed
from policies.cost.steps import StepCosts
from policies.decision.limits import LiveLimits, Terms
from policies.paths.estimates import Boundaries
from policies.plan import Path
from simulator.costs.costs import Costs, PathChoice
from simulator.world.setup import Setup


def terms_of(setup: Setup, costs: Costs) -> Terms:
    """The limits of decisions in the simulated world."""
    limits, migration = setup.limits, costs.migration
    measures_lead = (migration is not None or not costs.slots) and not limits.lead_s
    boundaries = Boundaries()
    if migration is not None:
        only = None if migration.path is PathChoice.ADAPTIVE else Path(migration.path.value)
        boundaries = Boundaries(migration.time_limit_s, migration.slowdown, only, migration.consensus)
    rate = rate_of(setup, costs) if costs.compute is None or not costs.compute.decode else None
    follows = setup.service is not None or bool(setup.classes.levels)
    return Terms(
        limits=LiveLimits(
            limits,
            limits.linger_s or (None if follows else 0.0),
            limits.foresight_s or (None if follows else 0.0),
            lead_s=None if measures_lead else limits.lead_s,
            slack=limits.slack or None,
        ),
        epoch_s=setup.epoch_s,
        boundaries=boundaries,
        moves_at_once=setup.moves_at_once,
        moves_per_replica=setup.moves_per_replica,
        placement_ttl_s=2 * setup.epoch_s,
        moves_take_time=migration is not None,
        starts_take_time=bool(costs.startup_s),
        may_wait_nowhere=costs.slots,
        batched=setup.batched,
        decode_rate=rate,
        per_node=setup.gpus_per_node,
        by_machine=setup.by_machine,
        service=setup.service,
        speed=speed_of(costs) if follows else speed_of(costs) or _prefill_speed(setup, costs),
        routing=setup.routing,
        sizes=setup.sizes,
        copies=setup.copies and migration is not None,
        classes=setup.classes,
        prefill_replicas=setup.prefill_gpus if migration is not None else 0,
        returns=setup.returns and setup.prefill_gpus > 0 and migration is not None,
        auto_prefills=setup.auto_prefills and migration is not None,
    )


def speed_of(costs: Costs) -> ReplicaSpeed | None:
    """The step times of replicas; None without costs of decoding and of prefills."""
    compute = costs.compute
    if compute is None or not (compute.decode and compute.prefill):
        return None
    return ReplicaSpeed(compute.steps, 0.0, compute.chunk_tokens)


def rate_of(setup: Setup, costs: Costs) -> float:
    """Tokens per second and request for costs without decode times."""
    return setup.slotted_rate if costs.slots else setup.decode_rate


def _prefill_speed(setup: Setup, costs: Costs) -> ReplicaSpeed:
    """The times of prefills where decoding has none; a prefill without time of its own takes one step of decoding."""
    compute = costs.compute
    if compute is None or not compute.prefill:
        return ReplicaSpeed(StepCosts(((1, 1 / rate_of(setup, costs)),)))
    return ReplicaSpeed(compute.steps, 0.0, compute.chunk_tokens)

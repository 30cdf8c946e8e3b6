"""An eclipse of the directory: free keys nearest to a run's key, among one or fifty honest bootstraps, hide no run."""

import pytest
import trio
from flockstep.peer.memory.network import run_virtual
from support.eclipse import VIA, eclipse

run_test = run_virtual


@pytest.mark.parametrize(
    ("num_honest", "num_networks", "first"),
    [(1, 1, "honest"), (50, 8, "honest"), (50, 8, "attackers")],
)
async def test_who_has_the_bootstraps_of_a_runs_members_in_its_link_finds_the_run_and_a_member(
    num_honest: int, num_networks: int, first: str
) -> None:
    async with eclipse(num_networks, first=first, num_honest=num_honest) as town:
        await town.publish(town.honest[:VIA])
        assert await town.joins(0, town.honest[:VIA]) == (True, True)
        assert await town.joins(1, town.honest[:1]) == (True, True)


async def test_most_links_with_other_bootstraps_lead_to_the_run_through_those_that_their_operators_name() -> None:
    async with eclipse(8, first="honest") as town:
        await town.publish(town.honest[:VIA])
        found = [await town.joins(number, town.honest[number : number + VIA]) for number in range(VIA, VIA + 6)]
        assert [each for each, _ in found].count(True) >= 5
        assert [each for _, each in found].count(True) >= 5


async def test_keys_that_are_silent_delay_a_newcomer_by_the_grace_and_not_by_timeouts() -> None:
    async with eclipse(8, first="honest", silent=True) as town:
        await town.publish(town.honest[:VIA])
        begun = trio.current_time()
        assert await town.joins(0, town.honest[:VIA]) == (True, True)
        assert trio.current_time() - begun < 5  # Virtual: two look-ups.

"""The limits of time in the launcher: which must be shorter than which, and why."""

from lockstep.launch import agent, coordinator, times
from lockstep.launch.decisions import hang_check, rank_exits, state_machine, status
from lockstep.launch.failure import CausedByPeer
from lockstep.launch.hangs import flight_recorder, watchdog
from lockstep.launch.nodes import search
from lockstep.launch.ranks import rank_process, zygote


def test_a_short_limit_stays_below_the_one_that_relies_on_it():
    beat, lost = times.HEARTBEAT_S, times.LOST_AFTER_S
    stacks = times.RANKS_STACKS_S + times.COLLECTIVES_S
    waits = rank_exits.ROOT_WAIT_S
    pairs = {
        "a heartbeat is sent on time": (coordinator.WAIT_S, beat),
        "a node is quiet only if a heartbeat is missing": (beat, rank_exits.QUIET_S),
        "a quiet node is waited for before it is lost": (rank_exits.QUIET_S, lost),
        "a coordinator that was held up looks before the others have lost it": (times.STALLED_LOOP_S, lost),
        "a node that collects stacks is not lost": (beat + stacks, lost),
        "a coordinator whose disk does not answer is not lost": (beat + times.SCAN_S, lost),
        "a node whose zygote is suspended is not lost": (
            beat + times.ZYGOTE_END_S + times.ZYGOTE_SEND_S,
            lost,
        ),
        "a zygote that the system refuses a fork takes requests in time": (zygote.FORK_S, times.ZYGOTE_SEND_S),
        # The coordinating node collects its own meanwhile, which it was asked for last.
        "stacks arrive while the coordinator waits for them": (beat + stacks, hang_check.NODES_STACKS_S),
        "a rank looks for requests before its answer is late": (
            flight_recorder.REQUEST_POLL_S,
            times.COLLECTIVES_S,
        ),
        "a zygote that stalls is killed before its node is given up": (
            agent.RANKS_KILL_S,
            status.NODES_KILL_S,
        ),
        "a lost node is called lost, and not slow to start": (lost, status.START_S),
        "a large process has longer to die": (waits[CausedByPeer.UNLIKELY], waits[CausedByPeer.CERTAIN]),
        "rank 0 of a lost coordinator ends before the next attempt": (rank_process.TERM_LOOK_S, state_machine.FENCE_S),
        "a watchdog that looks on time keeps its watch": (beat, watchdog.UNWATCHED_S),
        "a coordinator that lives is not taken for a dead job": (lost, search.STALE_S),
        "a successor has time to take over before a signal gives up": (lost + search.STAGGER_S, search.DELIVER_S),
    }
    assert not [why for why, (shorter, longer) in pairs.items() if shorter >= longer]

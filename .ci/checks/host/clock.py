"""The system's clock jumps under a daemon: a WARN line reports the size, the metrics count it, and stored times do
not follow it.
"""

from clocks import *


def stored(daemon):
    """Time at which the newest record was stored, in seconds since 1970."""
    _, read, _ = daemon.ready().call("wald.v1.WalService/Read", {"log": "a", "tailOffset": 1})
    batch = read["batch"]
    return int(batch["records"][0].get("timestampUs") or batch["timestampUs"]) / 1e6


def jumps(daemon, direction):
    return daemon.metric(f'wald_clock_jumps_total{{direction="{direction}"}}')


def jumped(directory, direction, signed):
    """One jump of `signed` seconds, under its own daemon: further lines may be left out for 10 seconds."""
    clock = Clock(compiled(directory), directory / "ahead")
    with Daemon(directory / f"data-{direction}", variables=clock.variables) as daemon:
        daemon.walctl("append", "a", "-", input=b"x\n", check=True)
        expect(f"{direction}: no jump is counted before", (jumps(daemon, "ahead"), jumps(daemon, "back")) == (0, 0))
        clock.set_ahead(signed)
        real = time.time()

        def counted():
            # Appends read the clock.
            daemon.walctl("append", "a", "-", input=b"x\n", check=True)
            return jumps(daemon, direction) == 1

        expect(f"{direction}: the metric counts the jump", wait_until(counted, 5), jumps(daemon, direction))
        last = daemon.metric("wald_clock_last_jump_seconds")
        expect(f"{direction}: the metric reports its size", abs(last - signed) < 2, last)

        def told():
            return [json.loads(line) for line in daemon.lines if "clock jumped" in line]

        wait_until(told, 5)
        fine = [(line["level"], line["direction"], abs(line["seconds"] - abs(signed)) < 2) for line in told()]
        expect(f"{direction}: a WARN line reports direction and size", fine == [("WARN", direction, True)], told())
        off = stored(daemon) - real
        expect(f"{direction}: the stored time does not follow", abs(off) < 30, f"{off:.1f} s")
        expect(f"{direction}: the daemon stops with 0", daemon.stop() == 0)


@check("The clock jumps 2 hours ahead: a warning, a metric, and stored times that do not follow")
def ahead(directory):
    jumped(directory, "ahead", 7200)


@check("The clock jumps 1 hour back: a warning, a metric, and stored times that do not follow")
def back(directory):
    jumped(directory, "back", -3600)

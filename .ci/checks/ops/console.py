"""The web console in a headless Chromium, as a person uses it; console.mjs has the steps."""

from buckets import *


@check("10,000 logs, 1,000 appends a second, all forms of records, a restart, keyboard, narrow windows")
def console():
    counted("node", ROOT / ".ci/checks/ops/console.mjs", *sys.argv[1:], cwd=ROOT)


@check("The console of a daemon with a replica shows its place, its state and its lag")
def replica(directory):
    with own(directory) as (store, _):
        shown = {"program": str(programs() / "wald"), "url": store.url, "variables": store.variables}
        counted("node", ROOT / ".ci/checks/ops/console.mjs", *sys.argv[1:], cwd=ROOT, env={**os.environ, "CONSOLE_REPLICA": json.dumps(shown)})

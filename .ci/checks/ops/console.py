"""The web console in a headless Chromium, as a person uses it; console.mjs has the steps."""

from common import *


@check("10,000 logs, 1,000 appends a second, all forms of records, a restart, keyboard, narrow windows")
def console():
    counted("node", ROOT / ".ci/checks/ops/console.mjs", *sys.argv[1:], cwd=ROOT)

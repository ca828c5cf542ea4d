"""A test with a server of its own: pytest testkit.py."""

import pytest
import wald
from wald.testing import EphemeralServer


@pytest.fixture(scope="session")
def server():
    with EphemeralServer() as server:
        yield server


@pytest.mark.asyncio
async def test_orders_are_kept(server):
    async with wald.Client(server.endpoint) as client:
        await client.append("orders", "tea")

        page = await client.read("orders", tail_offset=1)
        assert [record.text for record in page] == ["tea"]

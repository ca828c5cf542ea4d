"""A trace that goes through a log: `pip install opentelemetry-sdk`, then `tracing.py`, with a server at WALD_ENDPOINT.

A record carries the context of the span that made it, in the headers that W3C Trace Context defines: `traceparent`, and
`tracestate` if there is one. The program that processes the record links a span of its own to it.
"""

import asyncio

from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanKind

import wald

tracer = trace.get_tracer("orders")


async def send(client, order):
    with tracer.start_as_current_span("send orders", kind=SpanKind.PRODUCER):
        headers = {}
        propagate.inject(headers)
        await client.append("tracing/orders", wald.Record(order, headers=list(headers.items())))


def process(record):
    carrier = {key: value.decode() for key, value in record.headers if key in ("traceparent", "tracestate")}
    sender = trace.get_current_span(propagate.extract(carrier)).get_span_context()
    links = [Link(sender)] if sender.is_valid else []
    with tracer.start_as_current_span("process orders", kind=SpanKind.CONSUMER, links=links):
        return record.text


async def main():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    async with wald.Client.from_env() as client:
        for order in ("tea", "milk"):
            await send(client, order)
        for record in await client.read("tracing/orders", tail_offset=2):
            print(process(record))
    spans = exporter.get_finished_spans()
    for one, other in zip(spans[:2], spans[2:], strict=True):
        linked = other.links[0].context
        assert (linked.trace_id, linked.span_id) == (one.context.trace_id, one.context.span_id)
        print(f"{other.name} continues trace {one.context.trace_id:032x}")


if __name__ == "__main__":
    asyncio.run(main())

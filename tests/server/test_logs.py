import asyncio
import io

import httpx2

from servax.core.events import Notice, RequestFailed, StateChanged, StepFinished
from servax.server.logs import AccessLog, EventLog, logger


def test_events_become_lines():
    stream = io.StringIO()
    log = EventLog(logger(stream))
    log(Notice("fell back", "warning", {"target": "export"}))
    log(Notice("by the way"))
    log(StateChanged("net", "FAILED", "no luck"))
    log(StepFinished("restore", 1.23456))
    log(RequestFailed("net", "1", "predict", "Overloaded"))
    lines = [line.split(" ", 1) for line in stream.getvalue().splitlines()]
    assert all(stamp.startswith("timestamp=20") and stamp.endswith("Z") for stamp, _ in lines)
    assert [rest for _, rest in lines] == [
        'level=warning event="fell back" target=export',
        'level=info event="by the way"',
        'level=info event=state model=net state=FAILED reason="no luck"',
        "level=info event=step step=restore seconds=1.235",
    ]


def test_requests_are_written_and_probes_are_not():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 418, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    stream = io.StringIO()

    async def scene() -> None:
        transport = httpx2.ASGITransport(AccessLog(app, logger(stream)))
        async with httpx2.AsyncClient(transport=transport, base_url="http://host") as http:
            for path in ("/v2/health/ready", "/metrics", "/v2/models/net/ready"):
                await http.get(path)
            await http.post("/v2/models/net/infer")

    asyncio.run(scene())
    (line,) = stream.getvalue().splitlines()
    assert "event=request method=POST path=/v2/models/net/infer status=418 ms=" in line

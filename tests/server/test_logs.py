import io
import json

from servax.core.events import Notice, RequestFailed, StateChanged, StepFinished
from servax.server.logs import EventLog, logger


def tell(log: EventLog) -> None:
    log(Notice("fell back", "warning", {"target": "export"}))
    log(Notice("by the way"))
    log(StateChanged("net", "FAILED", "no luck"))
    log(StepFinished("restore", 1.23456))
    log(RequestFailed("net", "1", "predict", "Overloaded"))


def test_events_become_lines():
    stream = io.StringIO()
    tell(EventLog(logger(stream)))
    lines = [line.split(" ", 1) for line in stream.getvalue().splitlines()]
    assert all(stamp.startswith("timestamp=20") and stamp.endswith("Z") for stamp, _ in lines)
    assert [rest for _, rest in lines] == [
        'level=warning event="fell back" target=export',
        'level=info event="by the way"',
        'level=info event=state model=net state=FAILED reason="no luck"',
        "level=info event=step step=restore seconds=1.235",
    ]


def test_or_objects_of_json():
    stream = io.StringIO()
    tell(EventLog(logger(stream, as_json=True)))
    first, *_, last = map(json.loads, stream.getvalue().splitlines())
    assert (first["level"], first["event"], first["target"]) == ("warning", "fell back", "export")
    assert (last["step"], last["seconds"]) == ("restore", 1.235)

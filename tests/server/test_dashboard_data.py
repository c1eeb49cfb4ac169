"""The page's files, and what the page is told."""

from __future__ import annotations

import base64
import re
import threading

import httpx
import numpy as np
import pytest
from serving import GatedExecutor, http_server, settings, toy_core
from tiny_llm import VOCAB

from pagedkv.engine.toy import ToyExecutor
from pagedkv.server.app import create_app
from pagedkv.server.settings import DEFAULT_TENANT

OPERATOR, ALICE = "operators-key", "alices-key"
KEYS = {OPERATOR: DEFAULT_TENANT, ALICE: "alice"}
BODY = {"model": "toy", "prompt": "A block table is", "max_tokens": 30}


def names(text: str) -> set[str]:
    return set(re.findall(r"/dashboard/static/([\w.]+)", text)) | set(
        re.findall(r'from "\./([\w.]+)"', text)
    )


def test_every_file_that_the_page_names_is_served_under_a_strict_policy() -> None:
    with http_server() as url, httpx.Client(base_url=url) as client:
        wanted, seen = {"page.html"}, set()
        while wanted - seen:
            name = (wanted - seen).pop()
            seen.add(name)
            path = "/dashboard" if name == "page.html" else f"/dashboard/static/{name}"
            answer = client.get(path)
            assert answer.status_code == 200, path
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            tag = {"If-None-Match": answer.headers["etag"]}
            assert client.get(path, headers=tag).status_code == 304
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text)
            wanted |= names(answer.text)
        assert {"main.js", "style.css", "pool_map.js", "icon.svg"} <= seen
        for path in ("no.js", "..%2froutes.py", "%2e%2e%2froutes.py"):
            assert client.get(f"/dashboard/static/{path}").status_code == 404


def test_nothing_of_the_page_is_read_as_markup() -> None:
    with http_server() as url:
        for name in ("main.js", "tables.js", "charts.js", "format.js", "pool_map.js", "feed.js"):
            text = httpx.get(f"{url}/dashboard/static/{name}").text
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", text)
        page = httpx.get(f"{url}/dashboard").text
        assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", page)


def test_data_of_a_pool_while_a_request_runs_and_after() -> None:
    executor = GatedExecutor(ToyExecutor(64, 4, vocab_size=VOCAB))
    with http_server(lambda: toy_core(executor=executor)) as url, httpx.Client() as client:
        first = client.get(f"{url}/dashboard/data").json()
        assert first["picture"]["pool"]["numbers"]["free"] == 64
        assert first["server"] == {"model": "toy", "draining": False}
        answers: list[httpx.Response] = []
        post = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=BODY))
        )
        post.start()
        executor.allow(3)
        for _ in range(4):  # three steps are done, the fourth has begun
            assert executor.reached.acquire(timeout=60)
        ask = threading.Thread(target=lambda: answers.append(httpx.get(f"{url}/dashboard/data")))
        ask.start()  # is answered when the core comes out of its step
        executor.allow(None)
        post.join(60)
        ask.join(60)
        statuses = [answer.status_code for answer in answers]
        assert statuses == [200, 200]
        for _ in range(10_000):  # pictures are kept for a moment
            seen = client.get(f"{url}/dashboard/data").json()
            numbers = seen["picture"]["pool"]["numbers"]
            if numbers["cached"] and not numbers["held"]:
                break
        states = np.frombuffer(base64.b64decode(seen["picture"]["pool"]["states"]), np.uint8)
        assert len(states) == 64 and np.count_nonzero(states == 1) == numbers["cached"]
        assert seen["tenants"][0]["prompt_tokens"] == len(BODY["prompt"])
        assert seen["tenants"][0]["output_tokens"] == 30
        assert seen["hits"]["queried"] == len(BODY["prompt"])
        assert any("ended: length" in d["words"] for d in seen["picture"]["decisions"])


def test_a_pool_that_the_viewer_has_already_is_not_sent_again() -> None:
    with http_server() as url, httpx.Client() as client:
        seen = client.get(f"{url}/dashboard/data").json()
        run, pool = seen["run"], seen["picture"]["pool"]
        query = {"pool": pool["tag"], "since": seen["history"]["last"], "run": run}
        again = client.get(f"{url}/dashboard/data", params=query).json()
        assert "states" in pool and "states" not in again["picture"]["pool"]
        assert again["picture"]["pool"]["tag"] == pool["tag"]
        assert again["history"]["columns"]["second"][0] == seen["history"]["last"] + 1
        other = client.get(f"{url}/dashboard/data", params=query | {"run": "another"}).json()
        assert other["history"]["columns"]["second"][0] == 0


@pytest.mark.parametrize("query", ["since=x", "since=1e9", "since=-5", "pool=%00&run=%ff", "x=1"])
def test_queries_that_make_no_sense_are_answered(query: str) -> None:
    with http_server() as url:
        assert httpx.get(f"{url}/dashboard/data?{query}").status_code == 200


def test_a_core_that_has_died_is_said_to_be_dead() -> None:
    class Broken(ToyExecutor):
        def submit(self, step):
            raise SystemExit("the model is gone")

    core = toy_core(executor=Broken(64, 4, vocab_size=VOCAB))
    with http_server(lambda: core) as url:
        httpx.post(f"{url}/v1/completions", json=BODY)
        answer = httpx.get(f"{url}/dashboard/data")
        assert answer.status_code >= 500
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/static/main.js", "/dashboard/data"])
def test_it_shows_all_tenants_and_is_for_the_operator(path: str) -> None:
    with http_server(make_app=lambda engine: create_app(engine, settings(KEYS))) as url:
        for credentials in (None, ("", ALICE), ("", "wrong")):
            answer = httpx.get(url + path, auth=credentials)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Basic")
            assert "toy" not in answer.text
        assert httpx.get(url + path, auth=("", OPERATOR)).status_code == 200
        bearer = {"Authorization": f"Bearer {OPERATOR}"}
        assert httpx.get(url + path, headers=bearer).status_code == 200


def test_why_a_request_waited_is_told_by_the_id_of_its_answer() -> None:
    with http_server() as url:
        answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()
        told = httpx.get(f"{url}/dashboard/explain/{answer['id']}")
        assert told.status_code == 200 and "admitted in step 0" in told.text
        assert told.headers["content-type"].startswith("text/plain")
        nobody = httpx.get(f"{url}/dashboard/explain/nobody")
        assert nobody.status_code == 404 and "nobody" in nobody.json()["error"]["message"]

// Asks the server for what there is to see, some times a second.

const EVERY = 500; // ms
const CALM = 2000; // ms, where less motion is wanted, and while the server does not answer

export class Feed {
  // show(data, fresh): what the server has said, and whether it is another run of it than before.
  // fail(reason): it does not answer, or cannot.
  constructor({ show, fail }) {
    this.show = show;
    this.fail = fail;
    this.paused = false;
    this.asking = false;
    this.poolTag = "";
    this.lastSecond = -1;
    this.run = "";
    this.timer = 0;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    document.addEventListener("visibilitychange", () => document.hidden || this.soon(0));
  }

  start() {
    this.soon(0);
  }

  pause(wanted) {
    this.paused = wanted;
    if (!wanted) this.soon(0);
  }

  soon(delay) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), delay);
  }

  // One question at a time: answers refer to what the page has.
  async ask() {
    if (this.paused || document.hidden || this.asking) return;
    this.asking = true;
    let delay = CALM;
    try {
      delay = await this.once();
    } finally {
      this.asking = false;
      this.soon(delay);
    }
  }

  // Milliseconds until the next question.
  async once() {
    const query = new URLSearchParams({ pool: this.poolTag, since: this.lastSecond, run: this.run });
    let answer;
    try {
      answer = await fetch(`/dashboard/data?${query}`, {
        cache: "no-store",
        credentials: "same-origin",
        signal: AbortSignal.timeout(10000),
      });
    } catch {
      this.fail("The server does not answer.");
      return CALM;
    }
    let data;
    try {
      data = await answer.json();
    } catch {
      this.fail(`The server answers with status ${answer.status}, and nothing that can be shown.`);
      return CALM;
    }
    if (!answer.ok) {
      this.fail(data.error?.message ?? `The server answers with status ${answer.status}.`);
      return CALM;
    }
    this.poolTag = data.picture.pool.tag;
    this.lastSecond = data.history.last;
    const fresh = data.run !== this.run; // another server than before
    this.run = data.run;
    this.show(data, fresh);
    return this.calm.matches ? CALM : EVERY;
  }
}

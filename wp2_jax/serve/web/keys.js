// What is held: keys, buttons on the screen, a gamepad. The server gets whole states, with a lease that is renewed.

export const KEYS = {
  KeyW: "w", KeyA: "a", KeyS: "s", KeyD: "d", Space: "space",
  ArrowUp: "up", ArrowDown: "down", ArrowLeft: "left", ArrowRight: "right",
};
const LEASE_MS = 1500;
const RENEW_MS = 400;
const SILENT_RENEWALS = 40; // how many renewals a state without keys is not repeated for
const STICK = 0.4;

export class Held {
  // send(message) -> whether it went; changed(held): names of what is held now.
  constructor(send, changed) {
    this.send = send;
    this.changed = changed;
    this.names = new Map(); // of a key, or "event:" and its sentence -> {down, seq: the first state with it}
    this.presses = [];
    this.restart();
    this.silent = 0;
    setInterval(() => this.renew(), RENEW_MS);
  }

  // Numbers begin anew with every connection.
  restart() {
    this.seq = 0;
    this.latest = -1; // the newest state that a chunk has known
    this.names.clear();
    this.presses = [];
    this.changed(this.names);
  }

  press(name) {
    const held = this.names.get(name);
    if (held?.down) return;
    this.names.delete(name); // the event that was pressed last counts
    this.names.set(name, { down: true, seq: this.seq + 1 });
    this.presses.push({ seq: this.seq + 1, time: performance.now() });
    this.tell();
  }

  // A tap shorter than a chunk still counts for one: the key is let go when a chunk has known it.
  release(name) {
    const held = this.names.get(name);
    if (!held) return;
    held.down = false;
    this.used(this.latest);
  }

  releaseAll() {
    if (!this.names.size) return;
    this.names.clear();
    this.tell();
  }

  // A chunk was made that knew states up to this one.
  used(seq) {
    this.latest = seq;
    let any = false;
    for (const [name, held] of this.names) {
      if (!held.down && held.seq <= seq) any = this.names.delete(name);
    }
    if (any) this.tell();
  }

  // A chunk that knew states up to `seq` is seen: milliseconds since the oldest press that it is the first to show.
  latency(seq, now) {
    const shown = this.presses.filter((press) => press.seq <= seq);
    this.presses = this.presses.filter((press) => press.seq > seq);
    return shown.length ? now - shown[0].time : null;
  }

  tell() {
    this.seq += 1;
    this.silent = 0;
    this.state();
    this.changed(this.names);
  }

  state() {
    const names = [...this.names.keys()];
    const event = names.filter((name) => name.startsWith("event:")).at(-1)?.slice(6) ?? null;
    const keys = names.filter((name) => !name.startsWith("event:"));
    this.send({ type: "keys", seq: this.seq, keys, event, lease_ms: LEASE_MS });
  }

  renew() {
    this.silent += 1;
    if (document.hidden || (!this.names.size && this.silent < SILENT_RENEWALS)) return;
    this.silent = 0;
    this.seq += 1;
    this.state();
  }
}

// Makes a button hold a name while it is pressed, by pointer or by keyboard.
export function holdWith(button, held, name) {
  button.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    button.setPointerCapture(event.pointerId);
    held.press(name());
  });
  for (const kind of ["pointerup", "pointercancel", "lostpointercapture", "blur"]) {
    button.addEventListener(kind, () => held.release(name()));
  }
  button.addEventListener("contextmenu", (event) => event.preventDefault());
  for (const [kind, act] of [["keydown", "press"], ["keyup", "release"]]) {
    button.addEventListener(kind, (event) => {
      if (event.code !== "Space" && event.code !== "Enter") return;
      event.preventDefault();
      event.stopPropagation();
      held[act](name());
    });
  }
}

// The first gamepad that is there; events(): sentences of the first buttons.
export function watchGamepad(held, events) {
  let before = new Set();
  const look = () => {
    const pad = [...(navigator.getGamepads?.() ?? [])].find((one) => one?.mapping === "standard");
    const now = new Set();
    if (pad) {
      const [x, y, turn, look_] = pad.axes;
      const pressed = (number) => pad.buttons[number]?.pressed;
      if (x < -STICK || pressed(14)) now.add("a");
      if (x > STICK || pressed(15)) now.add("d");
      if (y < -STICK || pressed(12)) now.add("w");
      if (y > STICK || pressed(13)) now.add("s");
      if (turn < -STICK) now.add("left");
      if (turn > STICK) now.add("right");
      if (look_ < -STICK) now.add("up");
      if (look_ > STICK) now.add("down");
      if (pressed(0)) now.add("space");
      [2, 3, 1].forEach((button, number) => {
        if (pressed(button) && events()[number]) now.add(`event:${events()[number]}`);
      });
    }
    for (const name of now) if (!before.has(name)) held.press(name);
    for (const name of before) if (!now.has(name)) held.release(name);
    before = now;
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}

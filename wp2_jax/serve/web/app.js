// The page: from the elements of index.html to messages and back.

import { Held, KEYS, holdWith, watchGamepad } from "./keys.js";
import { head, Recording } from "./mp4.js";
import { Net } from "./net.js";
import { Player } from "./player.js";
import { Setup } from "./setup.js";
import { Timeline } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const REMEMBERED = "wp2-world";
const HIDDEN = "wp2-hidden"; // whether the page paused the world because nobody looked, also across a reload

let hello = null;
let player = null;
let state = null; // of the world that plays
let asked = null; // "start", "resume" or "reset", until the state comes that answers it
let fileHead = null;
let recording = null;
let startImage = null; // the <img> of the picture that the world began with
let lastShown = null; // number of the chunk that came last
const arrivals = [];

const held = new Held((message) => state && net.send(message), showHeld);
const setup = new Setup({
  start: (message, picture) => {
    if (picture) net.send(picture);
    asked = "start";
    startImage = setup.image;
    say("starting …");
    net.send(message);
  },
  change: (message) => state && net.send(message),
  say,
});
const timeline = new Timeline($("timeline"), (number) => {
  if (!state) return;
  net.send({ type: "fork", chunk: number });
  say(number ? `going on after chunk ${timeline.chunks.get(number).index + 1}` : "going on from the start");
});

let keepUntil = 0; // so long what was said stays, though pictures come
let refusal = null; // why the server does not let this page in

function say(text, seconds = 0) {
  $("message").textContent = text;
  keepUntil = performance.now() + 1000 * seconds;
}

function hear(message, data) {
  if (message.type === "hello") greeted(message);
  else if (message.type === "queue") say(`waiting for a place: position ${message.position}`);
  else if (message.type === "state") stated(message);
  else if (message.type === "chunk") arrived(message, data);
  else if (message.type === "saved") download(new Blob([data], { type: "application/zip" }), message.name);
  else if (message.type === "notice") say(message.text, 6);
  else if (message.type === "full") say(`the world has its ${message.chunks} chunks: go on from an earlier one, or reset`);
  else if (message.type === "end") ended(message);
  else if (message.type === "error") refused(message);
}

function greeted(message) {
  hello = message;
  $("weights").textContent = `playing: ${hello.weights}`;
  $("expect").textContent = hello.expect;
  $("video").style.aspectRatio = `${hello.width} / ${hello.height}`;
  try {
    player ??= new Player($("video"), hello, shown, (chunk) => timeline.draw(chunk.chunk, $("video")));
  } catch (error) {
    return say(error.message);
  }
  setup.offer(hello);
  held.restart();
  const world = sessionStorage.getItem(REMEMBERED);
  if (!world) return state === null && say("Choose a starting point, then Start.");
  asked = "resume";
  net.send({ type: "resume", world });
}

function stated(message) {
  if (asked === "start" || asked === "resume") {
    finishRecording();
    held.restart();
    player.reset();
    fileHead = null;
    lastShown = null;
  }
  if (asked === "start" || asked === "reset" || (asked === "resume" && !timeline.chunks.has(message.chunk))) {
    timeline.clear();
    if (startImage) timeline.draw(0, startImage);
  }
  const resumed = asked === "resume";
  if (asked) say("");
  asked = null;
  state = message;
  sessionStorage.setItem(REMEMBERED, state.world);
  timeline.mark(state.chunk);
  setup.playing(state);
  document.body.classList.add("playing");
  for (const id of ["pause", "reset", "record", "save", "leave"]) $(id).disabled = false;
  $("pause").setAttribute("aria-pressed", state.paused);
  $("seed").placeholder = `drawn (now ${state.seed})`;
  if (resumed) seen();
}

function arrived(chunk, data) {
  fileHead ??= head(data);
  recording?.add(data);
  timeline.add(chunk);
  player.add(chunk, data, chunk.parent !== lastShown && lastShown !== null);
  lastShown = chunk.chunk;
  held.used(chunk.seq);
  arrivals.push([performance.now(), chunk.pictures]);
  while (arrivals.length > 6) arrivals.shift();
  $("seconds").textContent = chunk.seconds.toFixed(2);
}

// The first picture of a chunk is on the screen.
function shown(chunk, now) {
  const latency = held.latency(chunk.seq, now);
  if (latency !== null) $("latency").textContent = `${Math.round(latency)} ms`;
  const pictures = arrivals.slice(1).reduce((sum, [, count]) => sum + count, 0);
  const seconds = arrivals.length > 1 ? (arrivals.at(-1)[0] - arrivals[0][0]) / 1000 : 0;
  $("rate").textContent = seconds ? (pictures / seconds).toFixed(1) : "–";
  $("chunk").textContent = `${chunk.index + 1} of ${hello.chunks}`;
  $("told-keys").textContent = chunk.actions;
  $("told-caption").textContent = chunk.caption || "(nothing)";
  if (now > keepUntil) say("");
}

function forget() {
  state = null;
  sessionStorage.removeItem(REMEMBERED);
  finishRecording();
  setup.stopped();
  document.body.classList.remove("playing");
  for (const id of ["pause", "reset", "record", "save", "leave"]) $(id).disabled = true;
}

function ended(message) {
  forget();
  say(message.reason === "left" ? "the world was left" : `the world ended: ${message.message}`);
}

function refused(message) {
  if (message.about === "resume") forget();
  if (!hello) refusal = message.message;
  asked = null;
  say(message.message, 6);
}

function lost() {
  state = null;
  held.restart();
  say(refusal ?? "the connection is lost, trying again …");
}

function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

function finishRecording() {
  if (recording && !recording.empty) download(recording.file(), `world-${state?.seed ?? "lost"}.mp4`);
  recording = null;
  $("record").setAttribute("aria-pressed", "false");
}

function pause(paused) {
  if (state) net.send({ type: "pause", paused });
}

$("pause").addEventListener("click", () => pause(!state.paused));
$("reset").addEventListener("click", () => {
  asked = "reset";
  net.send({ type: "reset" });
});
$("save").addEventListener("click", () => net.send({ type: "save" }));
$("leave").addEventListener("click", () => net.send({ type: "leave" }));
$("record").addEventListener("click", () => {
  if (recording) return finishRecording();
  if (!fileHead) return say("nothing to record yet");
  recording = new Recording(fileHead);
  $("record").setAttribute("aria-pressed", "true");
});
$("help-open").addEventListener("click", () => $("help").showModal());

// A button that was clicked keeps the focus, and Space would click it again instead of jumping.
document.addEventListener("click", (event) => {
  if (event.detail && event.target.closest?.("#stage button")) $("stage").focus({ preventScroll: true });
});

// Events.

function eventButtons() {
  return [...$("events").children];
}

function eventTexts() {
  return eventButtons().map((button) => button.dataset.event);
}

function addEvent(text) {
  if (!text || eventTexts().includes(text) || eventButtons().length >= 9) return;
  const button = document.createElement("button");
  button.type = "button";
  button.dataset.event = text;
  const key = document.createElement("kbd");
  key.textContent = eventButtons().length + 1;
  button.append(key, ` ${text}`);
  holdWith(button, held, () => `event:${text}`);
  $("events").append(button);
}

$("event-add").addEventListener("submit", (event) => {
  event.preventDefault();
  addEvent($("event-text").value.trim().replace(/\.+$/, ""));
  $("event-text").value = "";
});
setup.onEvents = (texts) => texts.forEach(addEvent);

// Keys.

function showHeld(names) {
  for (const button of document.querySelectorAll("[data-key]")) {
    button.classList.toggle("held", names.has(button.dataset.key));
  }
  for (const button of eventButtons()) button.classList.toggle("held", names.has(`event:${button.dataset.event}`));
}

for (const button of document.querySelectorAll("[data-key]")) holdWith(button, held, () => button.dataset.key);
watchGamepad(held, eventTexts);

const typing = (target) => target.closest?.("input:not([type=radio]), textarea, select, dialog");

function nameOf(event) {
  const digit = /^(?:Digit|Numpad)([1-9])$/.exec(event.code);
  if (digit) return eventTexts()[digit[1] - 1] && `event:${eventTexts()[digit[1] - 1]}`;
  if (event.code === "Space" && event.target.closest?.("button, label, input")) return null;
  return KEYS[event.code];
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.ctrlKey) return setup.apply();
  if (typing(event.target) || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "?") return $("help").showModal();
  if (event.code === "KeyP" && !event.repeat && state) return pause(!state.paused);
  const name = nameOf(event);
  if (!name || !state) return;
  event.preventDefault();
  if (!event.repeat) held.press(name);
});
document.addEventListener("keyup", (event) => {
  const name = nameOf(event) ?? KEYS[event.code];
  if (name) held.release(name);
});
window.addEventListener("blur", () => held.releaseAll());
document.addEventListener("visibilitychange", () => {
  if (document.hidden) held.releaseAll();
  if (document.hidden && state && !state.paused) {
    sessionStorage.setItem(HIDDEN, "yes");
    pause(true);
  } else {
    seen();
  }
});

function seen() {
  if (document.hidden || !state || !sessionStorage.getItem(HIDDEN)) return;
  sessionStorage.removeItem(HIDDEN);
  pause(false);
}

const net = new Net(hear, lost);

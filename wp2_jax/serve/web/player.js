// Shows chunks in a <video> through MediaSource, and says when one can be seen.

const KEEP_SECONDS = 20;
const MOST_LAG = 1.6; // seconds behind what came last; beyond, it is caught up with

export class Player {
  // shown(chunk, milliseconds): its first picture is on the screen; drawn(chunk): a picture of it is.
  constructor(video, hello, shown, drawn) {
    const Source = window.ManagedMediaSource ?? window.MediaSource;
    if (!Source?.isTypeSupported(hello.mime)) throw new Error(`this browser does not play ${hello.mime}`);
    Object.assign(this, { video, Source, mime: hello.mime, rate: hello.rate, shown, drawn });
    this.reset();
    const look = (now, frame) => {
      this.look(now, frame?.mediaTime ?? video.currentTime);
      again(look);
    };
    const again = (callback) =>
      video.requestVideoFrameCallback ? video.requestVideoFrameCallback(callback) : requestAnimationFrame(callback);
    again(look);
  }

  // A new stream: the server begins a file anew with every start and resume.
  reset() {
    this.parts = [];
    this.chunks = [];
    this.pictures = 0;
    this.buffer = null;
    const source = (this.source = new this.Source());
    if (this.url) URL.revokeObjectURL(this.url);
    this.video.src = this.url = URL.createObjectURL(source);
    source.addEventListener("sourceopen", () => {
      if (source !== this.source) return;
      this.buffer = source.addSourceBuffer(this.mime);
      this.buffer.addEventListener("updateend", () => this.pump());
      this.pump();
    });
  }

  // A chunk that follows what is shown, or (jump) is shown at once.
  add(chunk, data, jump) {
    const start = this.pictures / this.rate;
    this.pictures += chunk.pictures;
    this.chunks.push({ chunk, start, end: this.pictures / this.rate, seen: false });
    this.parts.push({ data, start, jump });
    this.pump();
  }

  pump() {
    const { buffer, video } = this;
    if (!buffer || buffer.updating) return;
    if (this.arrived) {
      const { start, jump } = this.arrived;
      this.arrived = null;
      if (jump || start - video.currentTime > MOST_LAG) video.currentTime = start;
      if (video.paused) video.play().catch(() => {});
    }
    const part = this.parts.shift();
    if (part) {
      this.arrived = part;
      buffer.appendBuffer(part.data);
    } else if (buffer.buffered.length && video.currentTime - buffer.buffered.start(0) > 2 * KEEP_SECONDS) {
      buffer.remove(0, video.currentTime - KEEP_SECONDS);
    }
  }

  look(now, time) {
    const at = time + 0.5 / this.rate;
    while (this.chunks.length > 1 && this.chunks[1].start <= at) this.chunks.shift();
    const [first] = this.chunks;
    if (!first || first.start > at) return;
    if (!first.seen) {
      first.seen = true;
      this.shown(first.chunk, now);
    }
    this.drawn(first.chunk);
  }
}

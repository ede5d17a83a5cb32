// The WebSocket: JSON messages, some of them followed by a binary one; comes back after a loss.

const WITH_DATA = new Set(["chunk", "saved"]);
const RETRY_MS = [500, 1000, 2000, 5000];

export class Net {
  // hear(message, data): every message, with its binary part. lost(): the connection ended; it is tried again.
  constructor(hear, lost) {
    this.hear = hear;
    this.lost = lost;
    this.attempt = 0;
    this.open();
  }

  open() {
    const url = new URL("play", location.href);
    url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    url.hash = "";
    const token = new URLSearchParams(location.hash.slice(1)).get("token");
    if (token) url.searchParams.set("token", token);
    let waiting = null;
    this.socket = new WebSocket(url);
    this.socket.binaryType = "arraybuffer";
    this.socket.onmessage = ({ data }) => {
      if (typeof data === "string") {
        const message = JSON.parse(data);
        if (message.type === "hello") this.attempt = 0;
        if (WITH_DATA.has(message.type)) waiting = message;
        else this.hear(message, null);
      } else if (waiting) {
        const message = waiting;
        waiting = null;
        this.hear(message, new Uint8Array(data));
      }
    };
    this.socket.onclose = () => {
      this.lost();
      const wait = RETRY_MS[Math.min(this.attempt++, RETRY_MS.length - 1)];
      setTimeout(() => this.open(), wait);
    };
  }

  get ready() {
    return this.socket.readyState === WebSocket.OPEN;
  }

  // A message, or the bytes of a picture; false if there is no connection.
  send(message) {
    if (!this.ready) return false;
    this.socket.send(message instanceof ArrayBuffer ? message : JSON.stringify(message));
    return true;
  }
}

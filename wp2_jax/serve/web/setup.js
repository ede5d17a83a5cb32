// The form of a new world, and what of it can be changed while one plays.

const $ = (id) => document.getElementById(id);
const OWN = "upload";

export class Setup {
  // start(message, picture), change(message), say(text): what the page does with what was filled in.
  constructor({ start, change, say }) {
    Object.assign(this, { start, change, say });
    this.onEvents = () => {};
    this.hello = null;
    this.picture = null;
    $("setup").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    $("apply").addEventListener("click", () => this.apply());
    $("file").addEventListener("change", () => this.take($("file").files[0]));
    $("gallery").addEventListener("change", () => this.choose());
    for (const radio of document.getElementsByName("perspective")) {
      radio.addEventListener("change", () => this.view());
    }
    for (const id of ["yaw", "pitch"]) {
      $(id).addEventListener("input", () => this.showSpeeds());
      $(id).addEventListener("change", () => this.change({ type: "speeds", ...this.speeds }));
    }
    document.addEventListener("paste", (event) => {
      const file = [...(event.clipboardData?.files ?? [])].find((one) => one.type.startsWith("image/"));
      if (file) this.take(file);
    });
    for (const kind of ["dragover", "dragleave", "drop"]) {
      document.addEventListener(kind, (event) => {
        if (!event.dataTransfer?.types.includes("Files")) return;
        event.preventDefault();
        document.body.classList.toggle("dragging", kind === "dragover");
        if (kind === "drop") this.take(event.dataTransfer.files[0]);
      });
    }
  }

  get speeds() {
    return { yaw: Number($("yaw").value), pitch: Number($("pitch").value) };
  }

  get chosen() {
    return document.querySelector("[name=place]:checked")?.value;
  }

  get image() {
    return document.querySelector("[name=place]:checked + img");
  }

  get perspective() {
    return document.querySelector("[name=perspective]:checked").value;
  }

  // The greeting of a server: fills in what can be chosen, once.
  offer(hello) {
    $("start").disabled = false;
    if (this.hello) return;
    this.hello = hello;
    for (const [id, speed] of [["yaw", hello.yaw], ["pitch", hello.pitch]]) {
      $(id).max = hello.trained ? speed : 5 * speed;
      $(id).step = "any";
      $(id).value = speed;
    }
    this.showSpeeds();
    for (const place of hello.gallery) this.offerPlace(place.name, place.thumbnail);
    if (hello.gallery.length) {
      document.querySelector("[name=place]").checked = true;
    } else {
      document.querySelector("[name=perspective]").checked = true;
    }
    this.onEvents(hello.gallery.flatMap((place) => place.events));
    this.choose();
  }

  offerPlace(name, url) {
    const label = document.createElement("label");
    const radio = Object.assign(document.createElement("input"), { type: "radio", name: "place", value: name });
    const image = Object.assign(document.createElement("img"), { src: url, alt: "" });
    label.append(radio, image, name === OWN ? "your picture" : name);
    $("gallery").append(label);
    return { radio, image };
  }

  choose() {
    const place = this.hello.gallery.find((one) => one.name === this.chosen);
    if (place) {
      document.querySelector(`[name=perspective][value=${place.perspective}]`).checked = true;
      $("scene").value = place.scene ?? place.caption;
      $("character").value = place.character ?? "";
      $("event").value = "";
    }
    this.view();
  }

  // First person has no character.
  view() {
    $("character").disabled = document.querySelector("[name=perspective]:checked")?.value === "fps";
  }

  async take(file) {
    if (!file || !this.hello) return;
    const most = this.hello.max_bytes;
    if (file.size > most) {
      return this.say(`${file.name}: ${file.size} bytes; at most ${most} are taken, make it smaller or save it as JPEG`);
    }
    this.picture = await file.arrayBuffer();
    this.own ??= this.offerPlace(OWN, "");
    this.own.image.src = URL.createObjectURL(file);
    this.own.radio.checked = true;
    if (!document.querySelector("[name=perspective]:checked")) document.querySelector("[value=fps]").checked = true;
    $("scene").focus();
    this.say(`${file.name || "the picture"} is taken: say what it shows, then Start`);
  }

  showSpeeds() {
    for (const id of ["yaw", "pitch"]) $(`${id}-value`).textContent = `${Number($(id).value).toFixed(1)}° / 4 pictures`;
  }

  caption() {
    const caption = { scene: $("scene").value, event: $("event").value };
    if (!$("character").disabled) caption.character = $("character").value;
    return caption;
  }

  apply() {
    if (!$("apply").disabled) this.change({ type: "caption", ...this.caption() });
  }

  submit() {
    if (!this.chosen) return this.say("choose a starting point, or a picture of your own");
    const seed = $("seed").value.trim();
    const message = {
      type: "start", picture: this.chosen, perspective: this.perspective, fit: $("fit").value,
      ...this.caption(), ...this.speeds,
    };
    if (seed) message.seed = Number(seed);
    this.start(message, this.chosen === OWN ? this.picture : null);
    $("stage").focus();
    $("stage").scrollIntoView({ block: "start" });
  }

  playing(state) {
    $("apply").disabled = false;
    $("start").textContent = "Start anew";
    $("yaw").value = state.yaw;
    $("pitch").value = state.pitch;
    this.showSpeeds();
  }

  stopped() {
    $("apply").disabled = true;
    $("start").textContent = "Start";
  }
}

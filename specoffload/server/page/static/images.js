// Images for the next message: chosen, pasted or dropped, and shown above the message field.

import { announce, byId, el, iconButton } from "./dom.js";

const MOST_SIDE_PX = 2048; // models read images in at most a few thousand tokens
const MOST_BYTES = 8 * 2 ** 20;
const SENT_AS_THEY_ARE = ["image/png", "image/jpeg"];

/** The images that were added. `on.change()` after each change; `on.refused(words)` if one cannot be read. */
export class Tray {
  images = []; // data URLs

  constructor(on) {
    this.on = on;
    this.canRead = false; // whether the model reads images
    this.root = byId("tray");
    this.button = byId("attach");
    this.file = el("input", { type: "file", accept: "image/*", multiple: true });
    this.button.addEventListener("click", () => this.file.click());
    this.file.addEventListener("change", () => {
      void this.add(this.file.files);
      this.file.value = "";
    });
    document.addEventListener("paste", (event) => this.#from(event, event.clipboardData));
    document.addEventListener("dragover", (event) => hasFiles(event.dataTransfer) && event.preventDefault());
    document.addEventListener("drop", (event) => this.#from(event, event.dataTransfer));
  }

  /** Say whether the model reads images. */
  show(canRead) {
    this.canRead = canRead;
    this.button.hidden = !canRead;
  }

  /** Take the images out, for a message. */
  take() {
    const taken = this.images;
    this.images = [];
    this.#draw();
    return taken;
  }

  async add(files) {
    const found = [...files].filter((file) => file.type.startsWith("image/"));
    if (!found.length) return;
    if (!this.canRead) return this.on.refused("This model reads no images: start the server with --mmproj FILE.");
    for (const file of found) {
      try {
        this.images.push(await dataUrl(file));
      } catch {
        this.on.refused(`${file.name || "The image"} cannot be read by this browser.`);
      }
    }
    this.#draw();
    announce(this.images.length === 1 ? "1 image is attached" : `${this.images.length} images are attached`);
  }

  #from(event, data) {
    if (!hasFiles(data)) return;
    event.preventDefault();
    void this.add(data.files);
  }

  #draw() {
    this.root.hidden = !this.images.length;
    this.root.replaceChildren(...this.images.map((url, at) => el("span", { class: "tray-image" }, picture(url), this.#remover(at))));
    this.on.change();
  }

  #remover(at) {
    return iconButton("close", "Remove the image", () => {
      this.images.splice(at, 1);
      this.#draw();
    });
  }
}

export function picture(url) {
  return el("img", { src: url, alt: "Image", class: "picture" });
}

const hasFiles = (data) => [...(data?.items ?? [])].some((item) => item.kind === "file");

/** The image as a data URL; large ones are made smaller, and other types become PNG. */
async function dataUrl(file) {
  const image = await createImageBitmap(file);
  const scale = Math.min(1, MOST_SIDE_PX / Math.max(image.width, image.height));
  if (scale === 1 && file.size <= MOST_BYTES && SENT_AS_THEY_ARE.includes(file.type)) return asRead(file);
  const canvas = el("canvas", { width: Math.round(image.width * scale), height: Math.round(image.height * scale) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/png");
}

function asRead(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

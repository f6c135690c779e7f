// Pictures of a message: read from files, scaled down if they are large, shown, and removed again. A picture is a data
// URL, or null if the browser's storage has not kept it.

import {make} from "./dom.js";

const MAX_SIDE = 2048;  // pixels; models see no more of most pictures, and a photo has ten times the bytes
const AS_THEY_ARE = new Set(["image/png", "image/jpeg", "image/webp", "image/gif"]);

const dataUrl = blob => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.addEventListener("load", () => resolve(reader.result));
  reader.addEventListener("error", () => reject(reader.error));
  reader.readAsDataURL(blob);
});

// A file as a data URL. Raises an error with the name of the file if the browser cannot read it.
export async function readPicture(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);  // as its EXIF data says, it is turned
  } catch {
    throw new Error(`${file.name || "This"} is not a picture that this browser can read.`);
  }
  const scale = MAX_SIDE / Math.max(bitmap.width, bitmap.height);
  try {
    if (scale >= 1 && AS_THEY_ARE.has(file.type)) return await dataUrl(file);
    const [width, height] = [bitmap.width, bitmap.height].map(each => Math.max(1, Math.round(each * Math.min(1, scale))));
    const canvas = new OffscreenCanvas(width, height), context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(bitmap, 0, 0, width, height);
    const type = file.type === "image/jpeg" ? "image/jpeg" : "image/png";  // PNG keeps what is transparent
    return await dataUrl(await canvas.convertToBlob({type, quality: 0.92}));
  } finally {
    bitmap.close();
  }
}

// Asks for files.
export const choosePictures = () => new Promise(resolve => {
  const input = make("input", {type: "file", accept: "image/*", multiple: true});
  input.addEventListener("cancel", () => resolve([]));
  input.addEventListener("change", () => resolve([...input.files]));
  input.click();
});

// The pictures of a message. With `remove`, which gets a place in the list, each has a button.
export const pictures = (urls, remove = null) => make("div", {class: "pictures"}, ...urls.map((url, at) => {
  const name = `Picture ${at + 1}`;
  const shown = url ? make("img", {src: url, alt: name})
    : make("span", {class: "lost", title: "Browsers have little storage for pages."}, `${name} was not kept`);
  const drop = () => remove(at);
  return make("figure", {}, shown,
    ...(remove ? [make("button", {type: "button", "aria-label": `Remove ${name.toLowerCase()}`, onclick: drop}, "×")] : []));
}));

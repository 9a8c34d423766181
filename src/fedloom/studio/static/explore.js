// The latent explorer. One frame is under way at a time; what was asked for meanwhile is asked for once, at the end.

const page = document.querySelector("main"), get = (id) => document.getElementById(id);
const base = `/runs/${page.dataset.run}/${page.dataset.round}/`, reach = Number(page.dataset.reach);
const view = get("view"), plane = get("plane"), sliders = get("sliders"), share = get("share"), ends = document.querySelector(".ends");
const SAMPLES = 12;
const state = { draw: 0, values: [], ends: [1, 2], next: 0 };

function address(name, more) {
  const chosen = new URLSearchParams(new FormData(view));
  for (const [key, value] of Object.entries(more)) chosen.set(key, value);
  return `${base}${name}?${chosen}`;
}

async function ask(url) {
  const answer = await fetch(url);
  get("complaint").hidden = answer.ok;
  if (answer.ok) return answer;
  get("complaint").textContent = await answer.text();
  throw new Error("refused");
}

// A painter follows the newest wish and skips those that it could not keep up with.
function painter(canvas, wish, done = () => {}) {
  let wanted = false, busy = false;
  return async () => {
    wanted = true;
    if (busy) return;
    busy = true;
    while (wanted) {
      wanted = false;
      try {
        const start = performance.now();
        const picture = await createImageBitmap(await (await ask(wish())).blob());
        canvas.width = picture.width;
        canvas.height = picture.height;
        canvas.getContext("2d").drawImage(picture, 0, 0);
        done(performance.now() - start);
      } catch { /* the complaint is on the page */ }
    }
    busy = false;
  };
}

const here = () => ({ draw: state.draw, values: state.values.join(",") });
const paintFrame = painter(get("frame"), () => address("frame", here()), (time) => {
  page.dataset.frames = Number(page.dataset.frames || 0) + 1;
  if (page.dataset.frames > 1) get("speed").textContent = `${Math.round(time)} ms`; // the first waits for the models
});
const paintAtlas = painter(get("atlas"), () => address("atlas", here()));
const paintMiddle = painter(get("middle"), () => address("between", { first: state.ends[0], last: state.ends[1], share: share.value }));
const paintStrip = painter(get("strip"), () => address("strip", { first: state.ends[0], last: state.ends[1] }));

function show() {
  [...sliders.querySelectorAll("input")].forEach((slider, place) => {
    slider.value = state.values[place];
    slider.nextElementSibling.textContent = state.values[place].toFixed(2);
  });
  const [x, y] = state.values, pin = get("pin");
  pin.style.left = `${50 + (50 * x) / reach}%`;
  pin.style.top = `${50 - (50 * y) / reach}%`;
  get("where").textContent = y === undefined ? "" : `${x.toFixed(2)}, ${y.toFixed(2)}`;
  paintFrame();
}

function move(place, value) {
  state.values[place] = Math.round(1000 * Math.max(-reach, Math.min(reach, value))) / 1000;
}

function slider(place, part) {
  const label = document.createElement("label"), input = document.createElement("input"), output = document.createElement("output");
  const name = document.createElement("span");
  name.textContent = part === undefined ? `z[${place}]` : `${place + 1} (${Math.round(100 * part)} %)`;
  Object.assign(input, { type: "range", min: -reach, max: reach, step: 0.05 });
  input.setAttribute("aria-label", `Direction ${place + 1}`);
  input.addEventListener("input", () => {
    move(place, input.valueAsNumber);
    show();
    if (place > 1) paintAtlas();
  });
  label.append(name, input, output);
  return label;
}

async function begin(draw) {
  state.draw = draw;
  const start = await (await ask(address("start", { draw }))).json();
  state.values = start.values;
  state.values.forEach((value, place) => move(place, value));
  sliders.querySelectorAll("label").forEach((one) => one.remove());
  sliders.append(...state.values.map((_, place) => slider(place, start.shares[place])));
  sliders.querySelector("legend").hidden = start.shares.length === 0;
  get("map").hidden = state.values.length < 2;
  if (state.values.length > 1) paintAtlas();
  show();
}

function gallery() {
  ends.replaceChildren(...Array.from({ length: SAMPLES }, (_, place) => {
    const button = document.createElement("button"), picture = document.createElement("img"), mark = document.createElement("span");
    button.type = "button";
    picture.src = address("sample", { draw: place + 1 });
    picture.alt = `Sample ${place + 1}`;
    button.append(picture, mark);
    button.addEventListener("click", () => {
      state.ends[state.next] = place + 1;
      state.next = 1 - state.next;
      choose();
      if (state.ends[0] !== state.draw) begin(state.ends[0]);
    });
    return button;
  }));
  choose();
}

function choose() {
  [...ends.children].forEach((button, place) => {
    const mark = state.ends.map((end, side) => (end === place + 1 ? "AB"[side] : "")).join("");
    button.lastElementChild.textContent = mark;
    button.setAttribute("aria-pressed", String(mark !== ""));
  });
  paintMiddle();
  paintStrip();
}

const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
plane.addEventListener("keydown", (event) => {
  const step = STEPS[event.key], size = event.shiftKey ? 0.5 : 0.1;
  if (!step && event.key !== "Home") return;
  event.preventDefault();
  [0, 1].forEach((place) => move(place, step ? state.values[place] + size * step[place] : 0));
  show();
});

function point(event) {
  const box = plane.getBoundingClientRect();
  move(0, reach * ((2 * (event.clientX - box.left)) / box.width - 1));
  move(1, reach * (1 - (2 * (event.clientY - box.top)) / box.height));
  show();
}
plane.addEventListener("pointerdown", (event) => {
  plane.setPointerCapture(event.pointerId);
  point(event);
});
plane.addEventListener("pointermove", (event) => { if (plane.hasPointerCapture(event.pointerId)) point(event); });

share.addEventListener("input", paintMiddle);
get("home").addEventListener("click", () => begin(0));
view.addEventListener("submit", (event) => event.preventDefault());
view.addEventListener("change", () => {
  gallery();
  begin(state.draw);
});
begin(0).then(gallery);

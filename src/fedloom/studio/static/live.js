// A page about runs that go on: its sections are renewed one by one, only those that have changed.

import { announce, listen } from "./events.js";

const page = document.querySelector("main"), body = document.getElementById("body");
const keys = page.dataset.keys.split(" "), stamps = page.dataset.stamps.split(" ");
const shown = new Map(keys.map((key, place) => [key, stamps[place]])), known = new Map(shown);
const first = page.dataset.states.split(" "), states = new Map(keys.map((key, place) => [key, first[place]]));
let busy = false;
for (const section of body.children) section.dataset.html = section.outerHTML;

function kept(section) {
  const slider = section.querySelector(".player input");
  return {
    open: [...section.querySelectorAll("details")].map((one) => one.open),
    back: slider && slider.value !== slider.max ? slider.value : null, // the newest round stays the newest
    focused: section.contains(document.activeElement) ? document.activeElement.id : "",
  };
}

function restore(section, before) {
  [...section.querySelectorAll("details")].forEach((one, place) => { one.open = before.open[place] || false; });
  const slider = section.querySelector(".player input");
  if (slider && before.back !== null) {
    slider.value = before.back;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
  }
  if (before.focused) document.getElementById(before.focused)?.focus();
}

function renew(html) {
  const template = document.createElement("template");
  template.innerHTML = html; // the server has escaped whatever a run says
  const old = new Map([...body.children].map((section) => [section.id, section]));
  let last = null;
  for (const fresh of [...template.content.children]) {
    const before = old.get(fresh.id), state = before && kept(before);
    old.delete(fresh.id);
    if (before && before.dataset.html === fresh.outerHTML) {
      last = before;
      continue;
    }
    const source = fresh.outerHTML;
    if (before) before.replaceWith(fresh);
    else if (last) last.after(fresh);
    else body.prepend(fresh);
    fresh.dataset.html = source;
    if (state) restore(fresh, state);
    last = fresh;
  }
  for (const section of old.values()) section.remove();
}

async function fetchNews() {
  if (busy) return;
  busy = true;
  try {
    while ([...known].some(([key, stamp]) => shown.get(key) !== stamp)) {
      const wanted = new Map(known), answer = await fetch(page.dataset.live);
      if (!answer.ok) break;
      renew(await answer.text());
      for (const [key, stamp] of wanted) shown.set(key, stamp);
    }
  } finally {
    busy = false;
  }
}

listen(keys, (run, gone) => {
  if (gone) return;
  known.set(run.key, run.stamp);
  announce(run, states.get(run.key));
  states.set(run.key, run.state);
  if (keys.length === 1 && document.getElementById("progress")) {
    document.getElementById("progress").innerHTML = run.progress;
    document.getElementById("state").innerHTML = run.mark;
  }
  fetchNews();
});

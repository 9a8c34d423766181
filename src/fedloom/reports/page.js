"use strict";
(() => {
  const each = (selector, act, root = document) => root.querySelectorAll(selector).forEach(act);

  // All listeners are the document's, so that parts of a page may be put in later.

  // Sliders: every film of a player shows its newest frame up to the chosen round.
  const showRound = (slider) => {
    const player = slider.closest(".player"), round = JSON.parse(slider.dataset.rounds)[slider.valueAsNumber];
    player.querySelector("output").textContent = `round ${round}`;
    each(".film", (film) => {
      const frames = [...film.querySelectorAll("img")];
      const frame = frames.findLast((one) => Number(one.dataset.round) <= round) || frames[0];
      frames.forEach((one) => { one.hidden = one !== frame; });
      film.querySelector(".shown").textContent = `round ${frame.dataset.round}`;
    }, player);
  };
  document.addEventListener("input", (event) => { if (event.target.matches(".player input")) showRound(event.target); });
  each(".player input", showRound);

  // Hover: the text of the nearest point, along x in curves and in the plane in clouds.
  const tip = document.createElement("div"), points = new WeakMap();
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  let ruled = null;
  const hide = () => {
    tip.hidden = true;
    if (ruled) ruled.setAttribute("visibility", "hidden");
    ruled = null;
  };
  const hover = (event) => {
    const chart = event.target instanceof Element && event.target.closest("svg[data-hover]");
    if (!chart) {
      hide();
      return;
    }
    if (!points.has(chart)) points.set(chart, JSON.parse(chart.dataset.hover));
    const plane = chart.dataset.snap === "xy", rule = chart.querySelector(".rule");
    const box = chart.getBoundingClientRect(), scale = chart.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const distance = (point) => (plane ? Math.hypot(point[0] - x, point[1] - y) : Math.abs(point[0] - x));
    const nearest = points.get(chart).reduce((a, b) => (distance(b) < distance(a) ? b : a));
    const far = plane && distance(nearest) > 15;
    if (far || rule !== ruled) hide();
    if (far) return;
    tip.textContent = nearest[2];
    tip.hidden = false;
    const left = event.clientX + 14 + tip.offsetWidth > innerWidth ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4))}px`;
    if (rule) {
      rule.setAttribute("transform", `translate(${nearest[0]})`);
      rule.setAttribute("visibility", "visible");
    }
    ruled = rule;
  };
  const page = document.documentElement;
  for (const kind of ["pointermove", "pointerdown"]) page.addEventListener(kind, hover);
  for (const kind of ["pointerleave", "pointercancel"]) page.addEventListener(kind, hide);

  // A link to a run opens it.
  const open = () => {
    const target = document.getElementById(location.hash.slice(1));
    if (target && target.tagName === "DETAILS") target.open = true;
  };
  addEventListener("hashchange", open);
  open();

  // On paper everything is open.
  addEventListener("beforeprint", () => each("details:not([open])", (one) => { one.open = true; one.dataset.closed = ""; }));
  addEventListener("afterprint", () => each("details[data-closed]", (one) => { one.open = false; delete one.dataset.closed; }));
})();

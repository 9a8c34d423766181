"use strict";
(() => {
  const each = (selector, act, root = document) => root.querySelectorAll(selector).forEach(act);

  // Sliders: every film of a player shows its newest frame up to the chosen round.
  each(".player", (player) => {
    const slider = player.querySelector("input"), shown = player.querySelector("output");
    const rounds = JSON.parse(slider.dataset.rounds);
    const show = () => {
      const round = rounds[slider.valueAsNumber];
      shown.textContent = `round ${round}`;
      each("figure", (film) => {
        const frames = [...film.querySelectorAll("img")];
        const frame = frames.findLast((one) => Number(one.dataset.round) <= round) || frames[0];
        frames.forEach((one) => { one.hidden = one !== frame; });
        film.querySelector(".shown").textContent = `round ${frame.dataset.round}`;
      }, player);
    };
    slider.addEventListener("input", show);
    show();
  });

  // Hover: the text of the nearest point, along x in curves and in the plane in clouds.
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  each("svg[data-hover]", (chart) => {
    const points = JSON.parse(chart.dataset.hover), plane = chart.dataset.snap === "xy", rule = chart.querySelector(".rule");
    const hide = () => {
      tip.hidden = true;
      if (rule) rule.setAttribute("visibility", "hidden");
    };
    const show = (event) => {
      const box = chart.getBoundingClientRect(), scale = chart.viewBox.baseVal.width / box.width;
      const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
      const distance = (point) => (plane ? Math.hypot(point[0] - x, point[1] - y) : Math.abs(point[0] - x));
      const nearest = points.reduce((a, b) => (distance(b) < distance(a) ? b : a));
      if (plane && distance(nearest) > 15) return hide();
      tip.textContent = nearest[2];
      tip.hidden = false;
      const left = event.clientX + 14 + tip.offsetWidth > innerWidth ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14;
      tip.style.left = `${Math.max(4, left)}px`;
      tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4))}px`;
      if (rule) {
        rule.setAttribute("transform", `translate(${nearest[0]})`);
        rule.setAttribute("visibility", "visible");
      }
    };
    chart.addEventListener("pointermove", show);
    chart.addEventListener("pointerdown", show);
    chart.addEventListener("pointerleave", hide);
    chart.addEventListener("pointercancel", hide);
  });

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

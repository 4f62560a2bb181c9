// Two copies of a small network learn the samples that a reader clicks: one by Adam, one by SepSA.
// The first half is the mathematics, in float64 and in the order of the library; tests/test_play.py compares 50 steps
// with Python. The second half draws.
"use strict";

const HIDDEN = 12;
const BIAS_RIDGE = 1e-4; // the library's default for the head's bias in float64

// Numbers in (-1, 1) that are the same everywhere: a linear congruential generator modulo 2^31 - 1.
function generator(seed) {
  let state = seed;
  return () => {
    state = (48271 * state) % 2147483647;
    return (2 * state) / 2147483647 - 1;
  };
}

// output = w . tanh(v x + c) + b, all parameters in one array: v, c, w, b.
function initialParameters(seed) {
  const draw = generator(seed);
  const theta = new Float64Array(3 * HIDDEN + 1);
  for (let j = 0; j < HIDDEN; j++) {
    theta[j] = 4 + 2 * draw();
    theta[HIDDEN + j] = -theta[j] * ((2 * j + 1) / HIDDEN - 1 + 0.1 * draw()); // units cross zero all over the plane
    theta[2 * HIDDEN + j] = 0.3 * draw();
  }
  return theta;
}

// The head's input: the hidden units, and 1 for the bias.
function features(theta, x) {
  const phi = new Float64Array(HIDDEN + 1);
  for (let j = 0; j < HIDDEN; j++) phi[j] = Math.tanh(theta[j] * x + theta[HIDDEN + j]);
  phi[HIDDEN] = 1;
  return phi;
}

function dot(a, b) {
  let sum = 0;
  for (let j = 0; j < a.length; j++) sum += a[j] * b[j];
  return sum;
}

function predict(theta, x) {
  return dot(theta.subarray(2 * HIDDEN), features(theta, x));
}

// The gradient of (output - y)^2 with respect to all parameters.
function gradient(theta, x, y) {
  const phi = features(theta, x);
  const pull = 2 * (dot(theta.subarray(2 * HIDDEN), phi) - y);
  const g = new Float64Array(theta.length);
  for (let j = 0; j < HIDDEN; j++) {
    const slope = pull * theta[2 * HIDDEN + j] * (1 - phi[j] * phi[j]);
    g[j] = slope * x;
    g[HIDDEN + j] = slope;
    g[2 * HIDDEN + j] = pull * phi[j];
  }
  g[3 * HIDDEN] = pull;
  return g;
}

// Adam with PyTorch's defaults, on the first `count` parameters.
class Adam {
  constructor(count, rate) {
    this.count = count;
    this.rate = rate;
    this.steps = 0;
    this.first = new Float64Array(count);
    this.second = new Float64Array(count);
  }

  step(theta, g) {
    this.steps += 1;
    const one = 1 - 0.9 ** this.steps;
    const root = Math.sqrt(1 - 0.999 ** this.steps);
    for (let j = 0; j < this.count; j++) {
      this.first[j] = 0.9 * this.first[j] + 0.1 * g[j];
      this.second[j] = 0.999 * this.second[j] + 0.001 * g[j] * g[j];
      theta[j] -= ((this.rate / one) * this.first[j]) / (Math.sqrt(this.second[j]) / root + 1e-8);
    }
  }
}

// Recursive least squares for the head w: B is the inverse curvature, and forgotten ridge comes back by coordinates.
class RLS {
  constructor(w, ridge, forgetting) {
    const p = w.length;
    this.prior = Float64Array.from(w);
    this.forgetting = forgetting;
    this.ridge = new Float64Array(p).fill(ridge);
    this.ridge[p - 1] = Math.min(ridge, BIAS_RIDGE);
    this.left = Float64Array.from(this.ridge);
    this.B = Array.from(this.ridge, (r, i) => Float64Array.from(this.ridge, (_, j) => (i === j ? 1 / r : 0)));
    this.energy = 0; // the minimum of the objective
    this.samples = 0;
    this.cursor = 0;
  }

  // Learn a row of weight q: w moves by B phi e / (1/q + phi' B phi).
  row(w, phi, target, q) {
    const p = w.length;
    const b = this.B.map((line) => dot(line, phi));
    const alpha = 1 / q + dot(b, phi);
    const e = target - dot(w, phi);
    this.energy += (e * e) / alpha;
    for (let i = 0; i < p; i++) {
      w[i] += (b[i] * e) / alpha;
      for (let j = 0; j < p; j++) this.B[i][j] -= (b[i] * b[j]) / alpha;
    }
  }

  update(w, phi, target) {
    const p = w.length;
    const lambda = this.forgetting;
    for (const line of this.B) for (let j = 0; j < p; j++) line[j] /= lambda;
    for (let j = 0; j < p; j++) this.left[j] *= lambda;
    this.energy *= lambda;
    this.samples = lambda * this.samples + 1;
    this.row(w, phi, target, 1);
    const count = lambda === 1 ? 0 : Math.min(p, Math.ceil(-p * Math.log2(lambda)));
    for (let k = 0; k < count; k++) {
      const j = (this.cursor + k) % p;
      const unit = new Float64Array(p);
      unit[j] = 1;
      const lacking = this.ridge[j] - this.left[j];
      if (lacking > 0) this.row(w, unit, this.prior[j], lacking);
      this.left[j] = this.ridge[j];
    }
    this.cursor = (this.cursor + count) % p;
  }

  deviation(phi) {
    const spread = dot(this.B.map((line) => dot(line, phi)), phi);
    return Math.sqrt((Math.max(this.energy, 0) / this.samples) * (1 + spread));
  }
}

class AdamLearner {
  constructor(seed, rate) {
    this.theta = initialParameters(seed);
    this.optimizer = new Adam(this.theta.length, rate);
  }

  learn(x, y) {
    this.optimizer.step(this.theta, gradient(this.theta, x, y));
  }
}

// The head learns first; the body's gradient is taken at the new head.
class SepSALearner {
  constructor(seed, rate, ridge, forgetting) {
    this.theta = initialParameters(seed);
    this.head = this.theta.subarray(2 * HIDDEN);
    this.solver = new RLS(this.head, ridge, forgetting);
    this.optimizer = new Adam(2 * HIDDEN, rate);
  }

  learn(x, y) {
    this.solver.update(this.head, features(this.theta, x), y);
    this.optimizer.step(this.theta, gradient(this.theta, x, y));
  }

  deviation(x) {
    return this.solver.samples ? this.solver.deviation(features(this.theta, x)) : NaN;
  }
}

// What the test compares with Python: predictions on a grid after each of the samples.
function trace(samples, settings) {
  const adam = new AdamLearner(settings.seed, settings.rate);
  const sepsa = new SepSALearner(settings.seed, settings.rate, settings.ridge, settings.forgetting);
  return samples.map(([x, y]) => {
    adam.learn(x, y);
    sepsa.learn(x, y);
    const grid = [-1, -0.5, 0, 0.5, 1];
    return {
      adam: grid.map((g) => predict(adam.theta, g)),
      sepsa: grid.map((g) => predict(sepsa.theta, g)),
      deviation: grid.map((g) => sepsa.deviation(g)),
    };
  });
}

// ---------------------------------------------------------------------------------------------------- the page

class Page {
  constructor(root) {
    this.root = root;
    this.canvas = root.querySelector("canvas");
    this.samples = [];
    for (const input of root.querySelectorAll("input")) input.addEventListener("input", () => this.learnAgain());
    this.canvas.addEventListener("click", (event) => this.add(...this.place(event)));
    root.querySelector("[data-do=clear]").addEventListener("click", () => this.set([]));
    root.querySelector("[data-do=sine]").addEventListener("click", () => this.set(sine()));
    window.addEventListener("resize", () => this.draw());
    this.set(sine().slice(0, 20));
  }

  setting(name) {
    const value = Number(this.root.querySelector(`input[name=${name}]`).value);
    return name === "forgetting" ? 1 - (value === 0 ? 0 : 10 ** (value / 10 - 3.5)) : 10 ** value;
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * 2 - 1;
    return [x, 1.5 - ((event.clientY - box.top) / (box.height * PLOT)) * 3];
  }

  add(x, y) {
    if (Math.abs(y) > 1.5) return; // below the plane, where the features are drawn
    this.samples.push([x, y]);
    this.adam.learn(x, y);
    this.sepsa.learn(x, y);
    this.draw();
  }

  set(samples) {
    this.samples = samples;
    this.learnAgain();
  }

  learnAgain() {
    const [rate, ridge, forgetting] = ["rate", "ridge", "forgetting"].map((name) => this.setting(name));
    this.adam = new AdamLearner(SEED, rate);
    this.sepsa = new SepSALearner(SEED, rate, ridge, forgetting);
    for (const [x, y] of this.samples) {
      this.adam.learn(x, y);
      this.sepsa.learn(x, y);
    }
    for (const [name, text] of [
      ["rate", rate.toPrecision(2)],
      ["ridge", ridge.toPrecision(2)],
      ["forgetting", String(Number(forgetting.toPrecision(4)))],
    ])
      this.root.querySelector(`output[for=${name}]`).textContent = text;
    this.draw();
  }

  error(learner) {
    const squares = this.samples.map(([x, y]) => (predict(learner.theta, x) - y) ** 2);
    return Math.sqrt(squares.reduce((a, b) => a + b, 0) / squares.length);
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    const width = this.canvas.clientWidth;
    const height = Math.round(Math.min(560, Math.max(380, width * 0.6)));
    this.canvas.style.height = `${height}px`;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    const g = this.canvas.getContext("2d");
    g.scale(ratio, ratio);
    const colour = getComputedStyle(this.root).color;
    const plot = height * PLOT;
    const across = (x) => ((x + 1) / 2) * width;
    const down = (y) => ((1.5 - y) / 3) * plot;
    const xs = Array.from({ length: 201 }, (_, i) => i / 100 - 1);
    const curve = (f, style, thick) => {
      g.beginPath();
      xs.forEach((x, i) => g[i ? "lineTo" : "moveTo"](across(x), f(x)));
      g.strokeStyle = style;
      g.lineWidth = thick;
      g.stroke();
    };
    g.save();
    g.beginPath();
    g.rect(0, 0, width, plot);
    g.clip();
    if (this.samples.length) {
      g.beginPath(); // nine in ten targets, where the head is right about its features
      xs.forEach((x) => g.lineTo(across(x), down(predict(this.sepsa.theta, x) + 1.645 * this.sepsa.deviation(x))));
      [...xs]
        .reverse()
        .forEach((x) => g.lineTo(across(x), down(predict(this.sepsa.theta, x) - 1.645 * this.sepsa.deviation(x))));
      g.fillStyle = "rgba(63, 81, 181, 0.15)";
      g.fill();
    }
    curve((x) => down(predict(this.adam.theta, x)), ADAM, 2);
    curve((x) => down(predict(this.sepsa.theta, x)), SEPSA, 3);
    g.restore();
    this.samples.forEach(([x, y], i) => {
      g.beginPath();
      g.arc(across(x), down(y), 4, 0, 7);
      g.fillStyle = colour;
      g.globalAlpha = i === this.samples.length - 1 ? 1 : 0.45;
      g.fill();
      g.globalAlpha = 1;
    });
    for (let j = 0; j < HIDDEN; j++) {
      const unit = (x) => plot + (height - plot) * (0.55 - 0.38 * features(this.sepsa.theta, x)[j]);
      g.globalAlpha = 0.4;
      curve(unit, colour, 1);
    }
    g.globalAlpha = 1;
    g.fillStyle = colour;
    g.font = "12px sans-serif";
    g.fillText(`the ${HIDDEN} features that SepSA's head sees`, 8, plot + 14);
    const words = this.samples.length
      ? `${this.samples.length} samples, each learned once. Root mean square error at them: ` +
        `Adam ${this.error(this.adam).toFixed(3)}, SepSA ${this.error(this.sepsa).toFixed(3)}`
      : "Click into the plane to add a sample.";
    this.root.querySelector("[data-show=errors]").textContent = words;
  }
}

function sine() {
  const draw = generator(7);
  return Array.from({ length: 60 }, () => {
    const x = draw();
    return [x, Math.sin(4 * x) + 0.1 * draw()];
  });
}

const SEED = 2026;
const PLOT = 0.78; // the share of the canvas that is the plane
const ADAM = "#e65100";
const SEPSA = "#3f51b5";

if (typeof document !== "undefined")
  document.addEventListener("DOMContentLoaded", () => {
    const root = document.getElementById("play");
    if (root) new Page(root);
  });
if (typeof module !== "undefined") module.exports = { trace };

// usage: node draw.mjs NODE_DIRECTORY DRAWING.json PICTURE.png
//
// Draws a dashboard with uPlot in a headless browser, roughly as Grafana would: its grid, units,
// stacks, logarithmic axes, heatmaps, marks of restarts. Prints the titles of panels that stayed blank.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';

const [directory, drawing, picture] = process.argv.slice(2);
const require = createRequire(`${directory}/`);
const { chromium } = require('playwright-core');
const uplot = `${directory}/node_modules/uplot/dist`;
const board = JSON.parse(readFileSync(drawing));

/** Runs in the page. */
function paint(board) {
  const cell = { w: 66, h: 30 };
  const colors = ['#73bf69', '#f2cc0c', '#8ab8ff', '#ff780a', '#f2495c', '#b877d9', '#5794f2', '#ffa6b0', '#37872d', '#e0b400', '#c4162a', '#8f3bb8'];
  const named = { green: '#56a64b', red: '#e02f44', orange: '#ff9830', blue: '#5794f2', transparent: 'transparent' };
  const scaled = (value, base, units) => {
    let at = 0;
    while (Math.abs(value) >= base && at < units.length - 1) { value /= base; at += 1; }
    return `${+value.toPrecision(3)}${units[at]}`;
  };
  const say = (value, unit) => {
    if (value === null || value === undefined || !Number.isFinite(value)) return '';
    if (unit === 'bytes') return scaled(value, 1024, [' B', ' KiB', ' MiB', ' GiB', ' TiB']);
    if (unit === 'Bps') return scaled(value, 1000, [' B/s', ' kB/s', ' MB/s', ' GB/s']);
    if (unit === 'percentunit') return `${+(value * 100).toPrecision(3)}%`;
    if (unit === 's') {
      const size = Math.abs(value);
      if (size === 0) return '0 s';
      if (size < 1e-3) return `${+(value * 1e6).toPrecision(3)} µs`;
      if (size < 1) return `${+(value * 1e3).toPrecision(3)} ms`;
      if (size < 120) return `${+value.toPrecision(3)} s`;
      if (size < 7200) return `${+(value / 60).toPrecision(3)} min`;
      return size < 172800 ? `${+(value / 3600).toPrecision(3)} h` : `${+(value / 86400).toPrecision(3)} d`;
    }
    const tail = { reqps: ' req/s', rps: ' rd/s', ops: ' ops/s' }[unit] ?? '';
    return scaled(value, 1000, ['', ' K', ' M', ' G']) + tail;
  };
  const times = [];
  for (let at = board.from; at <= board.to; at += board.step) times.push(at);
  const column = (series) => {
    const values = new Map(series.values.map(([at, value]) => [Math.round((at - board.from) / board.step), Number(value)]));
    return times.map((_, at) => (Number.isFinite(values.get(at)) ? values.get(at) : null));
  };
  const element = (parent, kind, style, text = '') => {
    const made = parent.appendChild(document.createElement(kind));
    Object.assign(made.style, style);
    made.textContent = text;
    return made;
  };
  const blank = [];
  let bottom = 0;

  function stat(panel, box, size) {
    const { unit, thresholds, mappings } = panel.fieldConfig.defaults;
    const told = panel.series.map((one) => [one.name, column(one).filter((value) => value !== null).at(-1)]);
    if (!told.length || told.some(([, value]) => value === undefined)) blank.push(panel.title);
    const value = told[0]?.[1];
    const step = thresholds.steps.filter((each) => each.value === null || value >= each.value).at(-1);
    if (panel.options.colorMode === 'background') box.style.background = named[step.color];
    const mapped = mappings?.[0]?.options?.[String(value)]?.text;
    const text = panel.options.textMode === 'value_and_name' ? told.map(([name, each]) => `${name}: ${say(each, unit)}`).join(' ') : mapped ?? say(value, unit);
    element(box, 'div', { font: '600 30px sans-serif', textAlign: 'center', lineHeight: `${size.h - 34}px` }, text);
  }

  function legend(box, panel, columns, units) {
    const rows = columns.map((data, at) => {
      const there = data.filter((value) => value !== null);
      return { name: panel.series[at].name, color: colors[at % colors.length], unit: units[at], max: Math.max(...there), last: there.at(-1) };
    }).sort((a, b) => b.max - a.max);
    const list = element(box, 'div', { position: 'absolute', bottom: '2px', left: '8px', right: '8px', font: '10px sans-serif', height: '40px', overflow: 'hidden', lineHeight: '13px' });
    for (const row of rows) {
      const item = element(list, 'span', { marginRight: '10px', whiteSpace: 'nowrap', display: 'inline-block' });
      element(item, 'span', { color: row.color, fontWeight: 'bold' }, '━ ');
      element(item, 'span', {}, `${row.name} (max ${say(row.max, row.unit)})`);
    }
  }

  function lines(panel, box, size) {
    const { unit, custom, min } = panel.fieldConfig.defaults;
    const stacked = custom.stacking.mode === 'normal';
    const log = custom.scaleDistribution?.type === 'log';
    const columns = panel.series.map(column);
    const right = panel.series.map((one) => panel.fieldConfig.overrides.some((each) => new RegExp(each.matcher.options.slice(1, -1)).test(one.name)));
    const units = right.map((other) => (other ? panel.fieldConfig.overrides[0].properties.find((each) => each.id === 'unit').value : unit));
    let drawn = columns;
    if (stacked) {
      const sum = times.map(() => 0);
      drawn = columns.map((data) => data.map((value, at) => (sum[at] += value ?? 0)));
    }
    if (log) drawn = drawn.map((data) => data.map((value) => (value > 0 ? value : null)));
    if (!drawn.some((data) => data.some((value) => value !== null))) blank.push(panel.title);
    const range = (own) => (plot, low, high) => {
      if (log) return uPlot.rangeLog(low ?? 1, high ?? 10, 10, false);
      return [min === 0 ? 0 : Math.min(low ?? 0, 0), (high ?? 0) > 0 ? high * 1.08 : 1];
    };
    const axis = { stroke: '#ccc', grid: { stroke: '#2c2f36', width: 1 }, ticks: { stroke: '#2c2f36' }, font: '10px sans-serif' };
    const order = drawn.map((_, at) => at);
    if (stacked) order.reverse();
    const options = {
      width: size.w - 10, height: size.h - 78, legend: { show: false }, cursor: { show: false },
      scales: { x: { time: true }, y: { distr: log ? 3 : 1, range: range() }, right: { distr: 1, range: range() } },
      axes: [axis, { ...axis, size: 62, values: (_, ticks) => ticks.map((tick) => say(tick, unit)) },
        ...(right.includes(true) ? [{ ...axis, side: 1, size: 50, scale: 'right', grid: { show: false }, values: (_, ticks) => ticks.map((tick) => say(tick, 's')) }] : [])],
      series: [{}, ...order.map((at) => ({ stroke: colors[at % colors.length], width: 1.2, scale: right[at] ? 'right' : 'y', points: { show: false },
        fill: `${colors[at % colors.length]}${stacked ? 'aa' : '18'}` }))],
      hooks: { draw: [(plot) => {
        plot.ctx.save();
        plot.ctx.strokeStyle = '#5794f2'; plot.ctx.setLineDash([4, 4]);
        for (const mark of board.marks) {
          const x = plot.valToPos(mark, 'x', true);
          plot.ctx.beginPath(); plot.ctx.moveTo(x, plot.bbox.top); plot.ctx.lineTo(x, plot.bbox.top + plot.bbox.height); plot.ctx.stroke();
        }
        plot.ctx.restore();
      }] },
    };
    new uPlot(options, [times, ...order.map((at) => drawn[at])], element(box, 'div', {}));
    legend(box, panel, columns, units);
  }

  function heatmap(panel, box, size) {
    const { unit } = panel.fieldConfig.defaults;
    const rows = panel.series.map((one) => ({ le: one.le === '+Inf' ? Infinity : Number(one.le), data: column(one) })).sort((a, b) => a.le - b.le);
    const own = rows.map((row, at) => row.data.map((value, x) => Math.max(0, (value ?? 0) - (at ? rows[at - 1].data[x] ?? 0 : 0))));
    const max = Math.max(...own.flat(), 0);
    if (!(max > 0)) blank.push(panel.title);
    // Empty rows at both ends are left out.
    const used = own.map((row, at) => (row.some((value) => value > 0) ? at : -1)).filter((at) => at >= 0);
    const low = Math.max(0, used[0] - 1);
    const high = Math.min(rows.length - 1, used.at(-1) + 1);
    const canvas = element(box, 'canvas', { position: 'absolute', left: '8px', top: '26px' });
    [canvas.width, canvas.height] = [size.w - 16, size.h - 34];
    const pen = canvas.getContext('2d');
    const [left, width, height] = [62, (canvas.width - 62) / times.length, (canvas.height - 20) / (high - low + 1)];
    pen.font = '10px sans-serif';
    for (let at = low; at <= high; at += 1) {
      const y = canvas.height - 20 - (at - low + 1) * height;
      own[at].forEach((value, x) => {
        if (!(value > 0)) return;
        const share = Math.sqrt(value / max);
        pen.fillStyle = `hsl(${240 - 240 * share}, 85%, ${35 + 25 * share}%)`;
        pen.fillRect(left + x * width, y, Math.ceil(width), Math.ceil(height));
      });
      pen.fillStyle = '#ccc';
      if ((at - low) % Math.ceil((high - low + 1) / 12) === 0) pen.fillText(rows[at].le === Infinity ? '+Inf' : say(rows[at].le, unit), 4, y + 4);
    }
    for (let x = 0; x < times.length; x += Math.ceil(times.length / 6)) {
      pen.fillText(new Date(times[x] * 1000).toISOString().slice(11, 19), left + x * width, canvas.height - 4);
    }
  }

  document.body.style.cssText = 'margin:0;background:#111217;color:#ccccdc;font:13px sans-serif';
  for (const panel of board.panels) {
    const at = panel.gridPos;
    const size = { w: at.w * cell.w - 6, h: at.h * cell.h - 6 };
    bottom = Math.max(bottom, (at.y + at.h) * cell.h);
    const row = panel.type === 'row';
    const box = element(document.body, 'div', { position: 'absolute', left: `${at.x * cell.w + 6}px`, top: `${at.y * cell.h + 40}px`, width: `${size.w}px`,
      height: `${size.h}px`, background: row ? 'none' : '#181b1f', border: row ? 'none' : '1px solid #24272e', overflow: 'hidden' });
    element(box, 'div', { padding: '4px 8px', font: `500 ${row ? 15 : 13}px sans-serif` }, row ? `▾ ${panel.title}` : panel.title);
    ({ stat, timeseries: lines, heatmap }[panel.type] ?? (() => row || blank.push(panel.title)))(panel, box, size);
  }
  element(document.body, 'div', { position: 'absolute', left: '10px', top: '8px', font: '600 18px sans-serif' }, board.title);
  element(document.body, 'div', { position: 'absolute', top: `${bottom + 40}px`, height: '10px', width: `${24 * cell.w + 12}px` });
  return blank;
}

const browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: ['--no-sandbox'] });
try {
  const page = await browser.newPage({ viewport: { width: 1596, height: 900 } });
  const wrong = [];
  page.on('pageerror', (error) => wrong.push(String(error)));
  await page.setContent('<!doctype html><meta charset="utf-8">');
  await page.addStyleTag({ path: `${uplot}/uPlot.min.css` });
  await page.addScriptTag({ path: `${uplot}/uPlot.iife.min.js` });
  const blank = await page.evaluate(paint, board);
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
  await page.screenshot({ path: picture, fullPage: true });
  console.log(JSON.stringify({ blank: [...blank, ...wrong] }));
} finally {
  await browser.close();
}

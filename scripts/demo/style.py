"""The style sheet of the report: light and dark, wide and narrow, screen and paper."""

STYLE = """
:root { color-scheme: light dark; --bg: #fbfaf8; --card: #fff; --ink: #1d2024; --soft: #5d646d; --rule: #e3e0da;
  --good: #0b7a5c; --bad: #b3261e;
  --s1: #0072b2; --s2: #d55e00; --s3: #009e73; --s4: #b5559a; --s5: #a67c00; --s6: #3f8fc4; --s7: #5b4fa8;
  --s8: #6b6b6b; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --card: #1c2024; --ink: #eceae6; --soft: #a3a9b1;
  --rule: #31363c; --good: #4cc9a4; --bad: #ff8a80;
  --s1: #56a8e8; --s2: #ff8a4c; --s3: #35cf9f; --s4: #e08cc8; --s5: #e3bd3b; --s6: #8fd0ff; --s7: #a89cf5;
  --s8: #b5b5b5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: clamp(1.7rem, 4.5vw, 2.5rem); line-height: 1.15; letter-spacing: -.02em; margin: .2rem 0 .6rem; }
h2 { font-size: 1.2rem; margin: 0 0 .35rem; letter-spacing: -.01em; }
.brand { margin: 0; color: var(--soft); font-weight: 600; letter-spacing: .02em; }
.lead { font-size: 1.06rem; color: var(--soft); max-width: 46rem; margin: 0; }
.fault { color: var(--bad); font-weight: 600; border-left: 4px solid var(--bad); padding-left: .7rem; }
section { margin-top: 2.6rem; }
section > p { color: var(--soft); margin: 0 0 .8rem; max-width: 46rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11.5rem, 1fr)); gap: .8rem;
  margin: 1.8rem 0 0; }
.tiles div { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: .9rem 1.1rem; }
.tiles dt { color: var(--soft); font-size: .86rem; }
.tiles dd { margin: 0; font-size: 1.9rem; font-weight: 650; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; }
.tiles dd.of { font-size: .86rem; font-weight: 400; letter-spacing: 0; color: var(--soft); }
.legend { list-style: none; padding: 0; margin: 0 0 .7rem; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem;
  font-size: .9rem; }
.legend li { display: flex; align-items: center; gap: .45rem; }
.legend svg { width: 24px; }
.chart { display: block; width: 100%; min-width: 36rem; height: auto; }
.wide.chart-box { padding: 0; }
.chart .grid { stroke: var(--rule); }
.chart .round { stroke: var(--soft); stroke-width: 1; opacity: .28; }
.chart .kill { stroke: var(--bad); stroke-dasharray: 3 4; }
.chart text { fill: var(--soft); font-size: 12.5px; font-variant-numeric: tabular-nums; }
.chart .note { fill: var(--ink); paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
.chart .strong { font-weight: 650; font-size: 14px; }
.line { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round; }
.line.dashed { stroke-dasharray: 6 4; }
.killed { fill: none; stroke: currentColor; stroke-width: 2.6; }
.heldout { fill: var(--card); stroke: var(--ink); stroke-width: 2.4; }
.s1 { color: var(--s1); } .s2 { color: var(--s2); } .s3 { color: var(--s3); } .s4 { color: var(--s4); }
.s5 { color: var(--s5); } .s6 { color: var(--s6); } .s7 { color: var(--s7); } .s8 { color: var(--s8); }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 12px;
  padding: .5rem .8rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .92rem; }
th { font-weight: 600; text-align: left; color: var(--soft); font-size: .86rem; }
th, td { padding: .38rem .5rem; white-space: nowrap; }
.rounds tbody tr { border-top: 1px solid var(--rule); }
.rounds tr.void td, .rounds tr.split td { color: var(--bad); }
.grid-table { width: auto; }
.grid-table th[scope=row] { color: var(--ink); font-size: .92rem; padding-right: 1.2rem; }
.grid-table td, .grid-table thead th:not(:first-child) { text-align: center; padding: .18rem; min-width: 1.9rem; }
.cell { display: inline-grid; place-items: center; width: 1.55rem; height: 1.55rem; border-radius: 6px;
  line-height: 1;
  border: 1px solid transparent; }
.cell.cut { background: var(--good); color: var(--card); }
.cell.roster { border-color: var(--good); color: var(--good); }
.cell.absent { color: var(--soft); }
.cell.killed { border-color: var(--bad); color: var(--bad); }
.dot { display: inline-block; width: .7rem; height: .7rem; border-radius: 50%; background: currentColor;
  margin-right: .55rem; }
small { color: var(--soft); }
.why { display: block; white-space: normal; min-width: 12rem; }
code { font: .9em ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.sample { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 1rem 1.2rem;
  margin: 0;
  white-space: pre-wrap; overflow-wrap: anywhere;
  font: .92rem/1.5 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
footer { margin-top: 3rem; border-top: 1px solid var(--rule); color: var(--soft); font-size: .88rem; }
footer code { overflow-wrap: anywhere; }
@media print { main { max-width: none; padding: 0; } section { break-inside: avoid; } }
"""

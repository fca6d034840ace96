"""Medians, ratios, Markdown."""

from statistics import median


def markdown(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(str(c) for c in row) + " |" for row in rows])


def medians(rows):
    return {key: median(r[key] for r in rows) for key in ("tokens_per_s", "tokens_per_cpu_s", "peak_rss")}


def span(rows, key):
    values = [r[key] for r in rows]
    return f"{median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


def training(block):
    """Table of one number of tokens a step, and the ratios as a dictionary."""
    results = block["results"]
    middle = {name: medians(rows) for name, rows in results.items()}
    rows = []
    for name in sorted(results, key=lambda n: -middle[n]["tokens_per_s"]):
        how = block["how"].get(name, {})
        rows.append([name, span(results[name], "tokens_per_s"), span(results[name], "tokens_per_cpu_s"), f"{middle[name]['peak_rss'] / 1e9:.2f} GB",
                     f"{results[name][0]['losses'][0]:.4f}" if results[name][0].get("losses") else "",
                     ", ".join(f"{k} {v}" for k, v in how.items())])  # fmt: skip
    text = markdown(["", "tokens/s (range)", "tokens per CPU-second (range)", "peak memory", "first loss", "how"], rows)
    ours = {n: m for n, m in middle.items() if n.startswith("zaya")}
    peers = {n: m for n, m in middle.items() if n not in ours}
    ratios = {}
    if ours and peers:
        zaya = max(ours, key=lambda n: ours[n]["tokens_per_s"])
        wall = max(peers, key=lambda n: peers[n]["tokens_per_s"])
        cpu = max(peers, key=lambda n: peers[n]["tokens_per_cpu_s"])
        ratios = {
            "zaya": zaya, "best_by_wall": wall, "best_by_cpu": cpu,
            "wall": ours[zaya]["tokens_per_s"] / peers[wall]["tokens_per_s"],
            "cpu": ours[zaya]["tokens_per_cpu_s"] / peers[cpu]["tokens_per_cpu_s"],
            "memory": ours[zaya]["peak_rss"] / peers[wall]["peak_rss"],
        }  # fmt: skip
        text += (f"\n\n{zaya} against the best peer: **{ratios['wall']:.2f}x** tokens/s (against {wall}), **{ratios['cpu']:.2f}x** tokens per CPU-second "
                 f"(against {cpu}), **{ratios['memory']:.2f}x** the memory of {wall}.")  # fmt: skip
    return text, ratios


def check(report):
    rows = []
    for row in report["rows"]:
        how = ", ".join(f"{k} {v}" for k, v in row["how"].items()) + (", compiled" if row["compiled"] else "")
        rows.append([how, row["error"], "", ""] if "error" in row else
                    [how, f"{row['loss']:.1e}", f"{row['gradient']:.1e} ({row['worst']})", f"{row['temperatures']:.1e}"])  # fmt: skip
    return markdown(["tuned", "loss off by", "worst gradient, relative", "key temperatures, relative"], rows)


def kernels(lines):
    header = ["kernel", "precision", "zaya ms", "torch ms", "torch's best way", "wall", "per CPU"]
    return markdown(header, [
        [x["case"], x["precision"], ms(x["zaya"], "median_s"), ms(x["torch"], "median_s"), x["way"] or x["why"], ratio(x, "median_s"), ratio(x, "cpu_s")]
        for x in lines
    ])  # fmt: skip


def ms(rows, key):
    return f"{1e3 * median(r[key] for r in rows):.2f}" if rows else "-"


def ratio(line, key):
    if not line["zaya"] or not line["torch"]:
        return "-"
    return f"{median(r[key] for r in line['torch']) / median(r[key] for r in line['zaya']):.2f}x"

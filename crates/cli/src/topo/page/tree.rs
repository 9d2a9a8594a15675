//! The machine as a tree, drawn from left to right: a line for each device.

use std::collections::BTreeMap;
use std::fmt::Write;

use tensorwire::topology::PciPath;

use super::super::report::{Report, gpu_name, nic_name};
use super::super::text::nvlinks;
use crate::html::escape;

/// Between lines, and between the columns of a tree.
const LINE: usize = 34;
const COLUMN: usize = 170;
const BOX: usize = 26;
/// How wide the box of a device is, and how far curves reach beyond it.
const LEAF: usize = 250;
const CURVE: usize = 90;

/// A place in the tree.
#[derive(Debug, Default)]
struct Branch {
    /// What it is, for the picture; `title` is the whole of it, for a reader who points at it.
    label: String,
    title: String,
    class: &'static str,
    below: Vec<Self>,
    /// Which device it is: GPUs first, then NICs.
    device: Option<usize>,
}

/// A box that has its place.
struct Drawn<'a> {
    branch: &'a Branch,
    depth: usize,
    y: usize,
    parent: Option<(usize, usize)>,
}

pub(super) fn svg(report: &Report) -> Result<String, std::fmt::Error> {
    let root = grow(report);
    let depth = depth(&root);
    let (mut drawn, mut line) = (Vec::new(), 0);
    place(&root, 0, &mut line, &mut drawn);
    let curve = if report.affinity.is_empty() { 0 } else { CURVE };
    let (width, height) = (depth * COLUMN + LEAF + curve + 8, line.max(1) * LINE + 12);
    let mut svg = String::new();
    writeln!(
        svg,
        "<svg class=\"tree\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\" aria-label=\"the machine as a tree\">"
    )?;
    for Drawn { depth, y, parent, .. } in &drawn {
        if let Some((parent_depth, parent_y)) = parent {
            let (from, to) = (parent_depth * COLUMN + COLUMN - 24, depth * COLUMN + 4);
            let middle = to - 12;
            writeln!(svg, "<path class=\"twig\" d=\"M{from} {parent_y}H{middle}V{y}H{to}\"/>")?;
        }
    }
    curves(&mut svg, report, &drawn, depth)?;
    for Drawn { branch, depth: at, y, .. } in &drawn {
        let x = at * COLUMN + 4;
        let wide = if branch.device.is_some() { LEAF + (depth - at) * COLUMN - 4 } else { COLUMN - 28 };
        let (top, label) = (y - BOX / 2, escape(&branch.label));
        writeln!(
            svg,
            "<g class=\"{}\"><title>{}</title><rect x=\"{x}\" y=\"{top}\" width=\"{wide}\" height=\"{BOX}\" rx=\"5\"/>\
             <text x=\"{}\" y=\"{}\">{label}</text></g>",
            branch.class,
            escape(&branch.title),
            x + 8,
            y + 4,
        )?;
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}

/// From each GPU to its NIC, on the right.
fn curves(svg: &mut String, report: &Report, drawn: &[Drawn<'_>], depth: usize) -> std::fmt::Result {
    let gpus = report.machine.gpus.len();
    let line_of =
        |device: usize| drawn.iter().find(|drawn| drawn.branch.device == Some(device)).map(|drawn| drawn.y);
    for choice in &report.affinity {
        let (Some(from), Some(to)) = (line_of(choice.gpu), line_of(gpus + choice.nic)) else { continue };
        let x = depth * COLUMN + LEAF;
        let out = x + (20 + from.abs_diff(to) / 4).min(CURVE - 10);
        let text =
            escape(&format!("{} uses {} ({})", gpu_name(choice.gpu), nic_name(choice.nic), choice.link));
        writeln!(
            svg,
            "<path class=\"curve\" d=\"M{x} {from}C{out} {from} {out} {to} {x} {to}\"><title>{text}</title></path>"
        )?;
    }
    Ok(())
}

/// All devices below their node and bridges.
fn grow(report: &Report) -> Branch {
    let machine = &report.machine;
    let mut root = Branch {
        label: "machine".into(),
        title: machine.name.clone(),
        class: "machine",
        ..Branch::default()
    };
    let mut nodes: BTreeMap<Option<u32>, Branch> = BTreeMap::new();
    for node in &machine.nodes {
        let title = format!("CPUs {}, {}", node.cpus, crate::doctor::bytes(node.memory));
        let label = format!("NUMA node {}", node.number);
        nodes.insert(Some(node.number), Branch { label, title, class: "node", ..Branch::default() });
    }
    let only = match machine.nodes.as_slice() {
        [one] => Some(one.number),
        _ => None,
    };
    let mut add = |numa: Option<u32>, pci: &PciPath, leaf: Branch| {
        let node = nodes.entry(numa.or(only)).or_insert_with(|| {
            let label = numa.map_or("no node told".into(), |number| format!("NUMA node {number}"));
            Branch { title: label.clone(), label, class: "node", ..Branch::default() }
        });
        let bridges = pci.parts().len().saturating_sub(1);
        let mut at = node;
        for part in &pci.parts()[..bridges] {
            let index = at.below.iter().position(|branch| branch.title == *part && branch.device.is_none());
            let index = index.unwrap_or_else(|| {
                let branch =
                    Branch { label: part.clone(), title: part.clone(), class: "bridge", ..Branch::default() };
                at.below.push(branch);
                at.below.len() - 1
            });
            at = &mut at.below[index];
        }
        at.below.push(leaf);
    };
    for (index, gpu) in machine.gpus.iter().enumerate() {
        let label = format!("{} {}", gpu_name(index), short(&gpu.name));
        let title = format!("{}, {}, NVLinks: {}", gpu.name, gpu.pci, nvlinks(gpu));
        add(
            gpu.numa,
            &gpu.pci,
            Branch { label, title, class: "gpu", device: Some(index), ..Branch::default() },
        );
    }
    for (index, nic) in machine.nics.iter().enumerate() {
        let speed = nic.speed.map_or(String::new(), |speed| format!(", {} Gb/s", speed / 1000));
        let (class, down) = if nic.up.reason().is_some() { ("nic down", " (down)") } else { ("nic", "") };
        let label = format!("{} {}{speed}{down}", nic_name(index), nic.name);
        let (title, device) = (format!("{}, {}", nic.name, nic.pci), Some(machine.gpus.len() + index));
        add(nic.numa, &nic.pci, Branch { label, title, class, device, ..Branch::default() });
    }
    root.below = nodes.into_values().collect();
    root.below.iter_mut().for_each(shorten);
    root
}

/// Bridges with one thing below say nothing: they are left out, except for the host bridge.
fn shorten(branch: &mut Branch) {
    for below in &mut branch.below {
        while below.device.is_none() && below.below.len() == 1 && below.below[0].device.is_none() {
            let only = below.below.remove(0);
            below.below = only.below;
        }
        shorten(below);
    }
    for below in &mut branch.below {
        let passes =
            |branch: &Branch| branch.class == "bridge" && branch.below.len() == 1 && !is_host(&branch.label);
        if passes(below) {
            *below = below.below.remove(0);
        }
    }
}

fn is_host(label: &str) -> bool {
    label.starts_with("pci")
}

/// A model without the maker, and no longer than its box.
fn short(name: &str) -> String {
    let name = name.strip_prefix("NVIDIA ").unwrap_or(name);
    if name.chars().count() <= 28 { name.into() } else { name.chars().take(27).chain(['…']).collect() }
}

fn depth(branch: &Branch) -> usize {
    branch.below.iter().map(|below| 1 + depth(below)).max().unwrap_or(0)
}

/// Each device has a line; what is above it is in the middle of what it holds. Gives the line's height.
fn place<'a>(branch: &'a Branch, depth: usize, line: &mut usize, drawn: &mut Vec<Drawn<'a>>) -> usize {
    let index = drawn.len();
    drawn.push(Drawn { branch, depth, y: 0, parent: None });
    let y = if branch.below.is_empty() {
        *line += 1;
        (*line - 1) * LINE + LINE / 2 + 6
    } else {
        let lines: Vec<usize> =
            branch.below.iter().map(|below| place(below, depth + 1, line, drawn)).collect();
        let (first, last) = (lines.first().copied().unwrap_or(0), lines.last().copied().unwrap_or(0));
        (first + last) / 2
    };
    drawn[index].y = y;
    // Those below know their line by now, but not yet that of what holds them.
    for below in
        drawn.iter_mut().skip(index + 1).filter(|below| below.depth == depth + 1 && below.parent.is_none())
    {
        below.parent = Some((depth, y));
    }
    y
}

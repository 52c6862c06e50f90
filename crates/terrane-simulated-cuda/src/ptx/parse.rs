//! Parses PTX texts into instructions.

use super::Kernel;
use super::instruction::{Action, Binary, Comparison, Instruction, Memory, Operand, Type, Unary};
use super::operands::{Names, kind};

/// Parses all kernels of a text.
pub fn kernels(text: &str) -> Result<Vec<Kernel>, String> {
    let text = without_comments(text);
    if !text.contains(".version") || !text.contains(".target") {
        return Err(String::from("no PTX: it has no `.version` or no `.target`"));
    }
    let mut rest = text.as_str();
    let mut kernels = Vec::new();
    while let Some((_, behind)) = rest.split_once(".entry") {
        let (head, behind) = behind.split_once('{').ok_or("a kernel without a body")?;
        let (body, behind) = split_at_end(behind).ok_or("a kernel without an end")?;
        kernels.push(kernel(head, body)?);
        rest = behind;
    }
    Ok(kernels)
}

/// Removes comments, and the lines that state the source location of an instruction.
fn without_comments(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, behind)) = rest.split_once("/*") {
        plain.push_str(before);
        rest = behind.split_once("*/").map_or("", |(_, behind)| behind);
    }
    plain.push_str(rest);
    let lines = plain.lines().map(|line| line.split("//").next().unwrap_or(line).trim());
    let kept = lines.filter(|line| !line.starts_with(".loc") && !line.starts_with(".file"));
    kept.collect::<Vec<&str>>().join("\n")
}

/// Splits at the brace that closes the scope.
fn split_at_end(text: &str) -> Option<(&str, &str)> {
    let mut depth = 1_u32;
    for (index, sign) in text.char_indices() {
        match sign {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some((text.get(..index)?, text.get(index + 1..)?));
        }
    }
    None
}

fn kernel(head: &str, body: &str) -> Result<Kernel, String> {
    let (name, behind) = match head.split_once('(') {
        Some((name, behind)) => {
            let (list, directives) = behind.split_once(')').ok_or("an open list of parameters")?;
            (name.trim(), Some((list, directives)))
        }
        None => (head.split_whitespace().next().unwrap_or_default(), None),
    };
    let mut names = Names::default();
    let (mut parameters, mut end) = (Vec::new(), 0);
    let (list, directives) = behind.unwrap_or(("", head));
    for text in list.split(',').map(str::trim).filter(|text| !text.is_empty()) {
        let variable = variable(text).ok_or_else(|| format!("the parameter `{text}`"))?;
        let offset = end_aligned(end, variable.alignment);
        names.add_variable(variable.name, offset);
        parameters.push((offset, variable.bytes));
        end = offset + variable.bytes;
    }
    let mut kernel = Kernel {
        name: name.to_owned(),
        parameters,
        code: Vec::new(),
        registers: 0,
        shared: 0,
        local: 0,
        most_threads: most_threads(directives),
        has_barriers: false,
    };
    let mut branches = Vec::new();
    for statement in body.split(';') {
        let mut statement = statement.trim();
        loop {
            // Scopes are ignored, because compilers use no name twice.
            statement = statement.trim_start_matches(['{', '}']).trim_start();
            let Some((label, behind)) = statement.split_once(':') else { break };
            if !label.chars().all(|sign| sign.is_alphanumeric() || matches!(sign, '_' | '$')) {
                break;
            }
            names.labels.insert(label.to_owned(), kernel.code.len());
            statement = behind.trim_start();
        }
        if statement.starts_with('.') {
            declare(statement, &mut kernel, &mut names)?;
        } else if !statement.is_empty() {
            let instruction = instruction(statement, &mut names, &mut branches, kernel.code.len())
                .map_err(|error| format!("{name}: `{statement}`: {error}"))?;
            kernel.has_barriers |= instruction.action == Action::Barrier;
            kernel.code.push(instruction);
        }
    }
    for (at, label) in branches {
        let target = *names.labels.get(&label).ok_or_else(|| format!("no label `{label}`"))?;
        if let Some(instruction) = kernel.code.get_mut(at) {
            instruction.action = Action::Branch(target);
        }
    }
    kernel.registers = names.registers();
    Ok(kernel)
}

/// `.maxntid 512, 1, 1`: the product.
fn most_threads(directives: &str) -> u64 {
    let Some((_, behind)) = directives.split_once(".maxntid") else { return 1024 };
    let numbers = behind.split('.').next().unwrap_or_default().split(',');
    let product: u64 = numbers.filter_map(|text| text.trim().parse::<u64>().ok()).product();
    product.clamp(1, 1024)
}

struct Variable<'a> {
    name: &'a str,
    alignment: usize,
    bytes: usize,
}

/// `.param .align 8 .b8 name[24]`, or `.param .u32 name`.
fn variable(text: &str) -> Option<Variable<'_>> {
    let (head, name) = text.trim().rsplit_once(char::is_whitespace)?;
    let (name, count) = match name.split_once('[') {
        Some((name, count)) => (name, count.strip_suffix(']')?.parse::<usize>().ok()?),
        None => (name, 1),
    };
    let mut words = head.split_whitespace();
    let (mut alignment, mut size) = (None, 0);
    while let Some(word) = words.next() {
        if word == ".align" {
            alignment = Some(words.next()?.parse::<usize>().ok()?);
        } else if let Some(kind) = word.strip_prefix('.').and_then(kind) {
            size = usize::try_from(kind.bytes()).ok()?;
        }
    }
    let bytes = size.checked_mul(count)?;
    Some(Variable { name, alignment: alignment.unwrap_or(size).max(1), bytes })
}

fn end_aligned(end: usize, alignment: usize) -> usize {
    end.next_multiple_of(alignment)
}

/// `.shared` and `.local` variables; other directives do not matter here.
fn declare(statement: &str, kernel: &mut Kernel, names: &mut Names) -> Result<(), String> {
    let end = if statement.starts_with(".shared") {
        &mut kernel.shared
    } else if statement.starts_with(".local") {
        &mut kernel.local
    } else {
        return Ok(());
    };
    let variable = variable(statement).ok_or_else(|| format!("the variable `{statement}`"))?;
    let offset = end_aligned(*end, variable.alignment);
    names.add_variable(variable.name, offset);
    *end = offset + variable.bytes;
    Ok(())
}

fn instruction(
    statement: &str,
    names: &mut Names,
    branches: &mut Vec<(usize, String)>,
    at: usize,
) -> Result<Instruction, String> {
    let (guard, rest) = match statement.strip_prefix('@') {
        None => (None, statement),
        Some(behind) => {
            let (guard, rest) = behind.split_once(char::is_whitespace).ok_or("a guard alone")?;
            let (expected, register) = match guard.strip_prefix('!') {
                Some(register) => (false, register),
                None => (true, guard),
            };
            (Some((names.register(register)?, expected)), rest.trim_start())
        }
    };
    let (opcode, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let operands = split(operands);
    let operands: Vec<&str> = operands.iter().map(String::as_str).collect();
    if opcode == "bra" || opcode == "bra.uni" {
        let [label] = operands.as_slice() else { return Err(String::from("one label")) };
        branches.push((at, (*label).to_owned()));
        return Ok(Instruction { guard, action: Action::Nothing });
    }
    Ok(Instruction { guard, action: action(opcode, &operands, names)? })
}

/// Splits at commas outside braces and brackets.
fn split(text: &str) -> Vec<String> {
    let (mut parts, mut depth) = (vec![String::new()], 0_u32);
    for sign in text.chars() {
        match sign {
            '{' | '[' => depth += 1,
            '}' | ']' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        if let Some(last) = parts.last_mut() {
            last.push(sign);
        }
    }
    let parts = parts.into_iter().map(|part| part.trim().to_owned());
    parts.filter(|part| !part.is_empty()).collect()
}

fn action(opcode: &str, operands: &[&str], names: &mut Names) -> Result<Action, String> {
    let parts: Vec<&str> = opcode.split('.').collect();
    let (Some(&base), last) = (parts.first(), parts.last().copied().unwrap_or_default()) else {
        return Err(String::from("no instruction"));
    };
    let has = |part: &str| parts.contains(&part);
    let unknown = || format!("the simulated device has no `{opcode}`");
    match base {
        "ret" | "exit" => return Ok(Action::Exit),
        "trap" | "brkpt" => return Ok(Action::Trap),
        "bar" | "barrier" if has("sync") && operands.len() < 2 => return Ok(Action::Barrier),
        "membar" | "fence" | "prefetch" | "prefetchu" | "nanosleep" => return Ok(Action::Nothing),
        _ => {}
    }
    let kind = kind(last).ok_or_else(unknown)?;
    // `.b64` and others are integer types elsewhere; here the type is a floating-point type.
    let is_moved = matches!(base, "mov" | "ld" | "ldu" | "st" | "selp");
    if last.starts_with('f') && !is_moved || has("cc") || has("sat") {
        return Err(unknown());
    }
    match (base, operands) {
        ("ld" | "ldu", [to, address]) => Ok(Action::Load {
            memory: memory(&parts).ok_or_else(unknown)?,
            kind,
            to: names.register_list(to)?,
            address: names.address(address)?,
        }),
        ("st", [address, from]) => Ok(Action::Store {
            memory: memory(&parts).ok_or_else(unknown)?,
            kind,
            from: names.operands(from)?,
            address: names.address(address)?,
        }),
        ("red", [address, from]) => atomic(&parts, kind, None, [address, from], names),
        ("atom", [to, address, from]) => {
            let to = names.register(to)?;
            atomic(&parts, kind, Some(to), [address, from], names)
        }
        ("mov", [to, from]) if to.starts_with('{') => {
            let to = names.register_list(to)?;
            Ok(Action::Unpack { part: part(kind, to.len())?, to, from: names.operand(from)? })
        }
        ("mov", [to, from]) if from.starts_with('{') => {
            let from = names.operands(from)?;
            Ok(Action::Pack { part: part(kind, from.len())?, to: names.register(to)?, from })
        }
        ("mov", [to, from]) => {
            Ok(Action::Move { to: names.register(to)?, from: names.operand(from)?, kind })
        }
        ("cvta", [to, from]) => {
            if has("shared") || has("local") || has("param") || has("const") {
                return Err(unknown());
            }
            Ok(Action::Move { to: names.register(to)?, from: names.operand(from)?, kind })
        }
        ("cvt", [to, from]) => {
            let to_kind = parts.iter().rev().nth(1).and_then(|part| super::operands::kind(part));
            let to_kind = to_kind.ok_or_else(unknown)?;
            if parts.iter().any(|part| part.starts_with('f')) {
                return Err(unknown());
            }
            Ok(Action::Convert {
                to_kind,
                kind,
                to: names.register(to)?,
                from: names.operand(from)?,
            })
        }
        ("setp", [to, left, right]) => {
            let operation =
                comparison(parts.get(1).copied().unwrap_or_default()).ok_or_else(unknown)?;
            let (to, opposite) = match to.split_once('|') {
                Some((to, opposite)) => (to, Some(names.register(opposite)?)),
                None => (*to, None),
            };
            let is_unsigned = matches!(parts.get(1), Some(&("lo" | "ls" | "hi" | "hs")));
            let kind = Type { is_signed: kind.is_signed && !is_unsigned, ..kind };
            let from = [names.operand(left)?, names.operand(right)?];
            Ok(Action::Compare { operation, kind, to: names.register(to)?, opposite, from })
        }
        ("selp", [to, yes, no, by]) => Ok(Action::Select {
            kind,
            to: names.register(to)?,
            from: [names.operand(yes)?, names.operand(no)?],
            by: names.operand(by)?,
        }),
        ("mad", [to, left, right, summand]) => Ok(Action::MultiplyAdd {
            operation: product(&parts),
            kind,
            to: names.register(to)?,
            factors: [names.operand(left)?, names.operand(right)?],
            summand: names.operand(summand)?,
        }),
        ("bfi", [to, inserted, into, at, count]) => {
            let mut operand = |text: &str| names.operand(text);
            let from = [operand(inserted)?, operand(into)?, operand(at)?, operand(count)?];
            Ok(Action::Insert { kind, to: names.register(to)?, from })
        }
        ("bfe", [to, of, at, count]) => {
            let from = [names.operand(of)?, names.operand(at)?, names.operand(count)?];
            Ok(Action::Extract { kind, to: names.register(to)?, from })
        }
        (_, [to, from]) => {
            let operation = unary(base).ok_or_else(unknown)?;
            Ok(Action::Unary {
                operation,
                kind,
                to: names.register(to)?,
                from: names.operand(from)?,
            })
        }
        (_, [to, left, right]) => {
            let operation = match base {
                "mul" => product(&parts),
                _ => binary(base).ok_or_else(unknown)?,
            };
            let (left, right): (Operand, Operand) = (names.operand(left)?, names.operand(right)?);
            Ok(Action::Binary { operation, kind, to: names.register(to)?, left, right })
        }
        _ => Err(unknown()),
    }
}

/// `red.global.xor.b64 [address], from`: no other step of the device runs between load and store.
fn atomic(
    parts: &[&str],
    kind: Type,
    to: Option<usize>,
    [address, from]: [&str; 2],
    names: &mut Names,
) -> Result<Action, String> {
    let operation = parts.iter().rev().nth(1).and_then(|operation| binary(operation));
    let operation =
        operation.filter(|operation| !matches!(operation, Binary::Divide | Binary::Remainder));
    let (operation, memory) =
        operation.zip(memory(parts)).ok_or("the simulated device has no such atomic")?;
    let (address, from) = (names.address(address)?, names.operand(from)?);
    Ok(Action::Atomic { operation, memory, kind, to, address, from })
}

/// The type of each of this many parts of a value.
fn part(whole: Type, parts: usize) -> Result<Type, String> {
    let parts = u32::try_from(parts).ok().filter(|parts| [2, 4].contains(parts));
    let parts = parts.ok_or_else(|| String::from("two or four registers"))?;
    Ok(Type { is_signed: false, bits: whole.bits / parts })
}

fn memory(parts: &[&str]) -> Option<Memory> {
    let has = |part: &str| parts.contains(&part);
    match () {
        () if has("param") => Some(Memory::Parameters),
        () if has("shared") => Some(Memory::Shared),
        () if has("local") => Some(Memory::Local),
        () if has("const") => None,
        () => Some(Memory::Global),
    }
}

fn product(parts: &[&str]) -> Binary {
    match parts.get(1) {
        Some(&"hi") => Binary::MultiplyHigh,
        Some(&"wide") => Binary::MultiplyWide,
        _ => Binary::Multiply,
    }
}

fn unary(base: &str) -> Option<Unary> {
    Some(match base {
        "not" => Unary::Not,
        "neg" => Unary::Negate,
        "abs" => Unary::Absolute,
        "popc" => Unary::Count,
        "clz" => Unary::Leading,
        "brev" => Unary::Reverse,
        _ => return None,
    })
}

fn binary(base: &str) -> Option<Binary> {
    Some(match base {
        "add" => Binary::Add,
        "sub" => Binary::Subtract,
        "div" => Binary::Divide,
        "rem" => Binary::Remainder,
        "min" => Binary::Least,
        "max" => Binary::Greatest,
        "and" => Binary::And,
        "or" => Binary::Or,
        "xor" => Binary::Xor,
        "shl" => Binary::ShiftLeft,
        "shr" => Binary::ShiftRight,
        _ => return None,
    })
}

fn comparison(text: &str) -> Option<Comparison> {
    Some(match text {
        "eq" => Comparison::Equal,
        "ne" => Comparison::Unequal,
        "lt" | "lo" => Comparison::Less,
        "le" | "ls" => Comparison::AtMost,
        "gt" | "hi" => Comparison::Greater,
        "ge" | "hs" => Comparison::AtLeast,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::operands::number;
    use super::*;

    #[test]
    fn numbers_and_variables_are_read() {
        assert_eq!(number("-1"), Some(u64::MAX));
        assert_eq!(number("0x10"), Some(16));
        assert_eq!(number("12U"), Some(12));
        let aligned = variable(".param .align 8 .b8 name_0[24]").unwrap();
        assert_eq!((aligned.name, aligned.alignment, aligned.bytes), ("name_0", 8, 24));
        let plain = variable(".param .u32 count").unwrap();
        assert_eq!((plain.name, plain.alignment, plain.bytes), ("count", 4, 4));
    }

    #[test]
    fn unsupported_instructions_are_named() {
        let text = ".version 8.0\n.target sm_80\n.visible .entry k() {\nfma.rn.f32 %f1, %f2, %f3, \
                    %f4;\nret;\n}";
        assert!(kernels(text).unwrap_err().contains("fma.rn.f32"));
        assert!(kernels("ELF").unwrap_err().contains("no PTX"));
    }

    #[test]
    fn parameters_have_their_offsets() {
        let text = ".version 8.0\n.target sm_80\n.visible .entry k(\n.param .u32 a,\n.param .u64 b,\
                    \n.param .align 8 .b8 c[20]\n)\n.maxntid 96, 1, 1\n{\nret;\n}";
        let kernels = kernels(text).unwrap();
        assert_eq!(kernels[0].parameters, [(0, 4), (8, 8), (16, 20)]);
        assert_eq!((kernels[0].name.as_str(), kernels[0].most_threads), ("k", 96));
    }
}

//! Resolves paths to files. Re-exports are followed to the definition.

use std::cell::RefCell;
use std::collections::HashMap;

use super::modules::{Import, Modules};

/// The maximum number of imports that are followed for one name, because some import themselves.
const MOST_STEPS: usize = 32;

/// The target of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A module itself.
    Module(usize),
    /// An item that this module defines.
    Item(usize),
}

impl Modules {
    /// Returns pairs of files: a file, and another file with an item that the first one names.
    pub fn edges(&self) -> Vec<(usize, usize)> {
        let resolver = Resolver { modules: self, found: RefCell::default() };
        let mut edges = Vec::new();
        for (index, module) in self.all.iter().enumerate() {
            // A re-export alone does not use the file that it names.
            let imports = module.imports.iter().filter(|import| !import.is_reexport);
            let imported = imports.filter_map(|import| {
                match (resolver.resolve(index, &import.path, MOST_STEPS)?, &import.name) {
                    (Target::Item(found), _) | (Target::Module(found), None) => Some(found),
                    // The paths that begin with the module name its items.
                    (Target::Module(_), Some(_)) => None,
                }
            });
            let named = module.paths.iter().filter_map(|path| {
                match resolver.resolve(index, path, MOST_STEPS)? {
                    Target::Item(found) => Some(found),
                    Target::Module(_) => None,
                }
            });
            let files = imported.chain(named).map(|found| self.all[found].file);
            edges.extend(files.filter(|file| *file != module.file).map(|file| (module.file, file)));
        }
        edges.sort_unstable();
        edges.dedup();
        edges
    }
}

/// A name in a module, whether it ends a path, and the number of imports that may be followed.
type LookUp<'a> = (usize, &'a str, bool, usize);

struct Resolver<'a> {
    modules: &'a Modules,
    /// The results so far. Modules that import all names of each other would otherwise be searched
    /// again for each path between them.
    found: RefCell<HashMap<LookUp<'a>, Option<Target>>>,
}

impl<'a> Resolver<'a> {
    /// Resolves a path in the code of a module. `None` if it leads to another crate.
    fn resolve(&self, from: usize, path: &'a [String], steps: usize) -> Option<Target> {
        let steps = steps.checked_sub(1)?;
        let (first, mut rest) = path.split_first()?;
        let mut here = match first.as_str() {
            "crate" => Target::Module(0),
            "self" => Target::Module(from),
            "super" => Target::Module(self.modules.all[from].parent?),
            name => self.look_up(from, name, rest.is_empty(), steps)?,
        };
        while let (Target::Module(module), Some((next, after))) = (here, rest.split_first()) {
            rest = after;
            here = match next.as_str() {
                "super" => Target::Module(self.modules.all[module].parent?),
                // An item from a macro or another crate counts as that module's.
                name => {
                    let unseen = rest.is_empty().then_some(Target::Item(module));
                    self.look_up(module, name, rest.is_empty(), steps).or(unseen)?
                }
            };
        }
        Some(here)
    }

    /// Resolves a name in a module. A module and an item may have the same name. At the end of a
    /// path, the name is the item.
    fn look_up(&self, module: usize, name: &'a str, is_last: bool, steps: usize) -> Option<Target> {
        let key = (module, name, is_last, steps);
        let known = self.found.borrow().get(&key).copied();
        known.unwrap_or_else(|| {
            let found = self.search(module, name, is_last, steps);
            self.found.borrow_mut().insert(key, found);
            found
        })
    }

    fn search(&self, module: usize, name: &'a str, is_last: bool, steps: usize) -> Option<Target> {
        let here = &self.modules.all[module];
        let child = || here.children.get(name).map(|child| Target::Module(*child));
        let item = || here.items.contains(name).then_some(Target::Item(module));
        let follow = |import: &'a Import| self.resolve(module, &import.path, steps);
        let import = || {
            let mut imports = here.imports.iter();
            imports.find(|import| import.name.as_deref() == Some(name)).and_then(follow)
        };
        let found = if is_last {
            item().or_else(import).or_else(child)
        } else {
            child().or_else(import).or_else(item)
        };
        let all = || {
            let mut globs = here.imports.iter().filter(|import| import.name.is_none());
            globs.find_map(|glob| match follow(glob)? {
                Target::Module(other) if other != module => {
                    self.look_up(other, name, is_last, steps.checked_sub(1)?)
                }
                _ => None,
            })
        };
        found.or_else(all)
    }
}

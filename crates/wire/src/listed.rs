//! Enums with a list of their variants.

/// Declares an enum with `ALL`: each of its variants, in order.
#[macro_export]
macro_rules! listed {
    (
        $(#[$of_enum:meta])*
        $sight:vis enum $name:ident {
            $($(#[$of_variant:meta])* $variant:ident $(= $number:literal)?,)*
        }
    ) => {
        $(#[$of_enum])*
        $sight enum $name {
            $($(#[$of_variant])* $variant $(= $number)?,)*
        }

        impl $name {
            /// Every one, in order.
            pub const ALL: [Self; [$(stringify!($variant)),*].len()] = [$(Self::$variant),*];
        }
    };
}
